"""Processes of a run: how they meet, watch each other and end."""
