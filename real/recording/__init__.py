"""Recording of times on each rank, and their combination into one trace."""
