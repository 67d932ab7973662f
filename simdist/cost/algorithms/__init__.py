"""The algorithms of collectives, one family per file, and the choice between them.

A collective names its algorithm, or leaves the choice to the cluster's library with `auto`.

NCCL estimates the time of each of its algorithms and protocols when a communicator is made. It takes the fastest for
the size of the buffer. `auto`, `ring` and `double_tree` do the same here, by their costs on this cluster when it is
idle: see `simdist.cost.algorithms.nccl`. On a cluster with another library, rings and double trees are perfect
pipelines.

gloo has one algorithm for each collective. Each file declares its algorithm, with the collectives that it carries, as
`ALGORITHM`. A plan finds it by its name.

Source:
    NCCL, src/graph/tuning.cc, ncclTopoTuneModel and ncclTopoGetAlgoTime.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from simdist.cost.costs import Transfer
from simdist.cost.topology import Call, Messages
from simdist.errors import PlanError
from simdist.plan import algorithms, op_text

if TYPE_CHECKING:
    from simdist.scenario.cluster import Cluster

_WORK_OF_ALL_CHANNELS = (2, 22)  # 2.22.3: "Compress work structs so that they are shared between channels"
_FURTHER_CHANNEL = 0.058  # of a launch: 8 A100, one process: 5.7 and 5.9 % (experiments/nccl_tables)
_MOST_CHANNELS = 24
_LINE_NBYTES = 512 * 8  # of LL: 8 B of each of a channel's 512 threads, and for each rank


def collective_transfer(call: Call, cluster: "Cluster", capacity_Bps: NDArray[np.float64]) -> Transfer:
    """Return the transfer of a group.

    Args:
        call: The collective of one group.
        cluster: Its library decides the meaning of `auto` and the kind of rings and double trees.
        capacity_Bps: Capacity of every resource of the topology.

    Raises:
        PlanError: The collective has no such algorithm.
    """
    for problem in algorithms.problems(call.op):
        raise PlanError(f"{op_text(call.op)}: {problem}")
    if call.n == 1 and call.op.algorithm != "server":
        return Transfer(())
    if call.op.algorithm == "broadcasts":
        from simdist.cost.algorithms.broadcasts import broadcast_calls

        each = (collective_transfer(part, cluster, capacity_Bps) for part in broadcast_calls(call))
        return Transfer(tuple(stage for transfer in each for stage in transfer.stages))
    transfer = _transfer(call, cluster, capacity_Bps)
    if cluster.collectives.launch_s and transfer.stages:
        transfer = _launched(call, cluster, transfer, capacity_Bps)
    if call.topology.host is None or not transfer.stages:
        return transfer
    from simdist.cost.algorithms.gloo import host_s

    first, *others = transfer.stages
    return Transfer((replace(first, latency_s=first.latency_s + host_s(call)), *others))


def _launched(call: Call, cluster: "Cluster", transfer: Transfer, capacity_Bps: NDArray[np.float64]) -> Transfer:
    """Return the transfer of GPUs that one process drives: the next one begins when it is launched on all of them.

    NCCL up to 2.21 prepared the work of each channel by itself. It takes a channel for each line of LL, 24 at most.
    """
    n_gpus = int(np.bincount(call.topology.node(call.members)).max())
    launch_s = cluster.collectives.launch_s
    release = cluster.collectives.nccl_release
    if release is not None and release < _WORK_OF_ALL_CHANNELS:
        n_channels = min(_MOST_CHANNELS, math.ceil(call.nbytes / (_LINE_NBYTES * call.n)))
        launch_s *= 1 + _FURTHER_CHANNEL * max(0, n_channels - 1)
    waits_s = max(0.0, n_gpus * launch_s - transfer.alone_s(capacity_Bps))
    first, *others = transfer.stages
    return Transfer((replace(first, latency_s=first.latency_s + waits_s), *others))


def _transfer(call: Call, cluster: "Cluster", capacity_Bps: NDArray[np.float64]) -> Transfer:
    move = call.topology.transfer
    match call.op.algorithm:
        case "auto" | "ring" | "double_tree" | "nvls" as algorithm if cluster.collectives.library != "gloo":
            from simdist.cost.algorithms.nccl import nccl_transfer

            return nccl_transfer(call, cluster, cluster.collectives.library, algorithm, capacity_Bps)
        case "auto":
            from simdist.cost.algorithms import gloo

            transfer = move(gloo.gloo(call))
            return gloo.two_at_a_time(call, transfer, capacity_Bps) if call.topology.host else transfer
        case name:
            return move(cast("Iterable[Messages]", algorithms.find(name).messages(call)))
