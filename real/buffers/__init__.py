"""The buffers of a plan in memory, and operations on them on one rank."""
