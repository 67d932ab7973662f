"""Training loops of users that follow a schedule."""
