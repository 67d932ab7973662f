"""Studies of several runs: comparison of schedules, validation against reality, epochs, limits."""
