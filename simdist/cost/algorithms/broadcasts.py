"""An all-gather as one broadcast for each member, one after the other, each by the library's own algorithm.

With n members, S bytes, and one kind of link (latency alpha, 1/beta bytes per second), along chains

    all_gather   n (n-1) alpha + S beta

This is how optimizers that divide their work send updated parameters: each rank broadcasts those that it has updated.

Source:
    torch.distributed.optim.ZeroRedundancyOptimizer, _sync_params; InternLM/InternEvo,
    internlm/solver/optimizer/hybrid_zero_optim.py, broadcast_params.
"""

from collections.abc import Iterator
from dataclasses import replace

from simdist.cost.topology import Call
from simdist.plan import AllGather, Broadcast
from simdist.plan.algorithms import CollectiveAlgorithm


def broadcast_calls(call: Call) -> Iterator[Call]:
    """Yield the broadcasts, of one slice each."""
    for root in range(call.n):
        one = Broadcast("", call.op.group, root, lane=call.op.lane)
        yield replace(call, op=one, nbytes=call.nbytes // call.n)


ALGORITHM = CollectiveAlgorithm((AllGather,), broadcast_calls)
