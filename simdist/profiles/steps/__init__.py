"""Events of one rank, put together into its training steps."""
