"""A proof that a plan computes what its schedule declares."""

from simdist.proof.prover import prove

__all__ = ["prove"]
