"""Trace files of the PyTorch profiler, read into events."""
