"""Processes of a run: rendezvous, mutual monitoring and exit."""
