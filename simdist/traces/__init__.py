"""Traces, and tables of them: time by state, waiting between ranks, bandwidths of collectives."""
