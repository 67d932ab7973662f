"""Traces, and tables of them: where time went, which ranks waited for which, bandwidths of collectives."""
