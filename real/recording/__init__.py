"""Recording of times on every rank, and their way to one trace."""
