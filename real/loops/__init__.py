"""Users' training loops that follow a schedule."""
