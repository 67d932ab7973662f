"""The buffers of a plan in memory, and what turns them into others on one rank."""
