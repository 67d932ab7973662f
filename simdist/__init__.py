"""Simulate, run and compare synchronisation schedules for distributed training."""

__version__ = "0.1.0"
