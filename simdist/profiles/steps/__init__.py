"""Events of one rank, assembled into its training steps."""
