"""Watches while training: which rank is late, since when, and by how much."""
