"""Engines compute the times of all operations of a plan. `simdist.engines.run.run` is their only entry."""
