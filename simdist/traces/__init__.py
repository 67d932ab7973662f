"""Traces and what they say: where time went, who waited for whom, what collectives achieved."""
