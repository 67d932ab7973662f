"""Collectives message by message: what the closed forms of `simdist.cost` are held to.

`rounds` writes an algorithm as the messages that its members send, chunk by chunk; `play` sends them over a network,
each as soon as its sender has what it sends and its ports are free. The messages say which chunks they carry, so an
algorithm can also be carried out on data, to see that it reduces.

This package is an oracle for tests and benchmarks. It shares no code with `simdist.cost`, on purpose: algorithms are
written down twice, as messages here and as formulas there, so that a mistake in one is seen in the other. No engine
uses it, and nothing may be moved from here to there, or back.

Work and memory of a round are those of a few vectors over the members, so rings of thousands can be looked at, and
members may begin at different times.
"""

from expansion.play import Played, Wire, Wires, play
from expansion.round import Round
from expansion.rounds import rounds

__all__ = ["Played", "Round", "Wire", "Wires", "play", "rounds"]
