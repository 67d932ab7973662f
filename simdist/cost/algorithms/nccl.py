"""NCCL's double tree: by how much it falls short of a perfect pipeline.

NCCL sends by protocols. LL128 hands on pieces of 120 bytes as they come: a hop takes the latency of its link, and flags
take part of the bandwidth. Simple hands on whole chunks of 256 kB: every hop also waits for a chunk, between nodes
twice, since it passes the host's bus and then the network. Neither keeps all links busy at middle sizes; by how much is
NCCL's own table. With m nodes of n members, S bytes, and F seconds in which the bytes of a perfect pipeline would flow:

    2 (n-1) (alpha_f + c_f) + 2 ceil(log2 m) (alpha_n + c_n) + F / (0.9 e d(S))

    LL128    c_f = 0                             c_n = 0           e = 0.915
    Simple   c_f = 256 KiB / (12 GB/s) = 22 us   c_n = 2 c_f       e = 1

d(S), between 0.5 and 1, is interpolated between powers of two; the tree takes the faster protocol of those there are.
Waiting uses no link: what the pipeline lacks is time before the bytes flow, in which others may send.

Of a ring nothing is taken off here: its hops are those of the cluster's links. Nor is there the protocol LL, which
differs from LL128 in being slower at all but the smallest sizes, where both take their latency.

Source:
    NCCL, src/graph/tuning.cc at commit 01afd20a77b5: ncclTopoTuneModel, hwLat, treeCorrectionFactor. Later versions
    have 28 us in place of 50 for a hop of Simple between nodes, 0.92 in place of 0.9, and other values of d(S).
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.cost.algorithms.double_tree import double_tree
from simdist.cost.costs import Transfer
from simdist.cost.topology import Call, ChunkTimes

NcclLibrary: TypeAlias = Literal["nccl", "nccl_simple"]

_TREE_SHARE = 0.9  # tuning.cc: busBw*.9 of every tree
_SMALLEST_NBYTES = 64  # tuning.cc: the factors are those of powers of two from 64 B to 128 MB
_CHUNK_S = (
    256 * 1024 / 12e9
)  # tuning.cc: "the latency of a 256kB chunk, ~ base lat + 256k/12GB/s (+ as much for network)"


@dataclass(frozen=True, slots=True)
class _Protocol:
    """How a tree sends: seconds of chunks, share of the bandwidth, and its share by size (powers of two from 64 B)."""

    chunks: ChunkTimes
    share: float
    share_by_size: tuple[float, ...]

    def share_at(self, nbytes: float) -> float:
        """Return the share of the bandwidth of a perfect pipeline at a size."""
        doublings = math.log2(max(nbytes, _SMALLEST_NBYTES) / _SMALLEST_NBYTES)
        shares = (*self.share_by_size, 1.0)  # tuning.cc: no factor for larger ones
        of_size = np.interp(doublings, np.arange(len(shares)), shares)
        return _TREE_SHARE * self.share * float(of_size)


# fmt: off
_LL128 = _Protocol(
    ChunkTimes(0.0, 0.0),
    0.915,  # tuning.cc: LL128 over several nodes
    (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .5, .6, .6, .7, .7, .8, .9, .9, 1),  # treeCorrectionFactor
)
_SIMPLE = _Protocol(
    ChunkTimes(_CHUNK_S, 2 * _CHUNK_S),
    1.0,
    (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .5, .5, .6, .6, .7, .8, .9),  # treeCorrectionFactor
)
# fmt: on
_PROTOCOLS: dict[NcclLibrary, tuple[_Protocol, ...]] = {"nccl": (_LL128, _SIMPLE), "nccl_simple": (_SIMPLE,)}


def nccl_tree(call: Call, library: NcclLibrary, capacity_Bps: NDArray[np.float64]) -> Transfer:
    """Return what the double tree of NCCL moves, by the faster of its protocols.

    Args:
        call: The all-reduce of one group.
        library: Which protocols there are.
        capacity_Bps: Of every resource of the topology.

    Raises:
        PlanError: The collective is no all_reduce.
    """
    candidates = [_by(protocol, call, capacity_Bps) for protocol in _PROTOCOLS[library]]
    return min(candidates, key=lambda candidate: candidate.alone_s(capacity_Bps))


def _by(protocol: _Protocol, call: Call, capacity_Bps: NDArray[np.float64]) -> Transfer:
    (stage,) = call.topology.transfer(double_tree(call, protocol.chunks)).stages
    flow_s = stage.alone_s(capacity_Bps) - stage.latency_s
    stalled_s = flow_s * (1 / protocol.share_at(call.nbytes) - 1)
    return Transfer((dataclasses.replace(stage, latency_s=stage.latency_s + stalled_s),))
