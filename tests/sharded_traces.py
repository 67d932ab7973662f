"""Traces of a job with sharded parameters, of which everything is known: who computed late, by how much, in which unit.

Each unit gathers its parameters before its forward and its backward pass, and reduces its gradients behind the latter.
A collective begins on a rank when that rank has come to it, and ends on all ranks when the last one has, plus its
transfer. The host launches all work of a step at its beginning, and reads the loss at its end.
"""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kineto_drawing import AUTOGRAD, MAIN, NCCL_STREAM, Drawing

KERNELS = {
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "allreduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
GATHER_MS, REDUCE_MS = 1.0, 2.0
FORWARD_MS, BACKWARD_MS, UPDATE_MS = 5.0, 10.0, 3.0
LAUNCH_MS = 0.01
N_UNITS = 4
SAMPLES = 8  # of a micro-batch


@dataclass
class _Rank:
    drawing: Drawing
    host_ms: float = 0.0
    device_ms: float = 0.0
    thread: int = field(default=MAIN)

    def compute(self, kernel: str, milliseconds: float) -> None:
        self.drawing.gpu(kernel, self.host_ms, self.device_ms, self.device_ms + milliseconds, tid=self.thread)
        self.host_ms += LAUNCH_MS
        self.device_ms += milliseconds


def write_sharded(
    folder: Path,
    late_ms: Mapping[tuple[int, ...], float],
    *,
    n_ranks: int = 4,
    n_steps: int = 12,
    ahead: int = 0,
    micro_batches: int = 1,
    norm_ms: float = 0.0,
    norm_count: int = 41,
) -> Path:
    """Write a trace for each rank.

    Args:
        folder: Where to.
        late_ms: (rank, step) -> milliseconds that the backward pass of each unit takes longer. With a third number,
            only in that micro-batch, from 0.
        n_ranks: Of the job, all on one machine.
        n_steps: Of the traces.
        ahead: Units that the backward pass gathers before the one that it computes.
        micro_batches: Forward and backward passes of a step.
        norm_ms: How long the norm's all_reduce takes, behind the backward pass; without it there is none.
        norm_count: Its elements.

    Returns:
        The folder.
    """
    ranks = [_Rank(Drawing(_header(rank, n_ranks))) for rank in range(n_ranks)]
    for step in range(n_steps):
        begins_ms = _begin(ranks)
        for number in range(micro_batches):
            places = [((rank, step), (rank, step, number)) for rank in range(n_ranks)]
            _passes(ranks, [sum(late_ms.get(each, 0.0) for each in of_rank) for of_rank in places], ahead)
        for rank in ranks:
            rank.thread = MAIN
            rank.host_ms += LAUNCH_MS
        if norm_ms:
            _exchange(ranks, "allreduce", norm_ms, norm_count)
        _update(ranks, step, begins_ms)
    for number, rank in enumerate(ranks):
        text = json.dumps(rank.drawing.header | {"traceEvents": rank.drawing.events})
        (folder / f"rank{number}.json.gz").write_bytes(gzip.compress(text.encode(), 1))
    return folder


def _header(rank: int, n_ranks: int) -> dict[str, object]:
    return {
        "deviceProperties": [{"id": n, "name": "NVIDIA H100"} for n in range(n_ranks)],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": n_ranks},
    }


def _begin(ranks: list[_Rank]) -> list[float]:
    begins_ms = [rank.device_ms for rank in ranks]
    for rank in ranks:
        rank.host_ms = rank.device_ms
        rank.device_ms += 0.1
    return begins_ms


def _passes(ranks: list[_Rank], late_ms: list[float], ahead: int) -> None:
    for rank in ranks:
        rank.thread = MAIN
        rank.drawing.note("FSDP::root_pre_forward", rank.host_ms, rank.host_ms + LAUNCH_MS / 2)
    for _ in range(N_UNITS):
        _exchange(ranks, "_allgather_base", GATHER_MS)
        for rank in ranks:
            rank.drawing.note("FullyShardedDataParallel.forward", rank.host_ms, rank.host_ms + LAUNCH_MS / 2)
            rank.drawing.op(
                "aten::linear", rank.host_ms, rank.host_ms + LAUNCH_MS, Input_Dims=[[SAMPLES, 16], [16, 16]]
            )
            rank.compute("sgemm_forward", FORWARD_MS)
    for rank in ranks:
        rank.thread = AUTOGRAD
    n_gathered = 0
    for n_done in range(N_UNITS):
        while n_gathered < min(N_UNITS, n_done + 1 + ahead):
            _exchange(ranks, "_allgather_base", GATHER_MS)
            n_gathered += 1
        for rank, more_ms in zip(ranks, late_ms, strict=True):
            rank.drawing.node("MmBackward0", rank.host_ms, rank.host_ms + LAUNCH_MS, tid=AUTOGRAD)
            rank.compute("sgemm_backward", BACKWARD_MS + more_ms)
        _exchange(ranks, "_reduce_scatter_base", REDUCE_MS)


def _update(ranks: list[_Rank], step: int, begins_ms: list[float]) -> None:
    for rank, begin_ms in zip(ranks, begins_ms, strict=True):
        rank.drawing.note("Optimizer.step#AdamW.step", rank.host_ms, rank.host_ms + 3 * LAUNCH_MS)
        rank.host_ms += LAUNCH_MS
        rank.compute("multi_tensor_apply_kernel", UPDATE_MS)
        read_ms = rank.host_ms + 3 * LAUNCH_MS
        copied_ms = rank.device_ms + 0.01
        rank.drawing.op("aten::item", read_ms, copied_ms + 0.02)
        rank.drawing.gpu("Memcpy DtoH (Device -> Pageable)", read_ms, rank.device_ms, copied_ms, cat="gpu_memcpy")
        rank.drawing.call("cudaStreamSynchronize", read_ms + LAUNCH_MS, copied_ms + 0.01)
        rank.device_ms = copied_ms + 0.03
        rank.drawing.note(f"ProfilerStep#{step}", begin_ms, rank.device_ms)


def _exchange(ranks: list[_Rank], kind: str, transfer_ms: float, n_elements: int = 1_000_000) -> None:
    shard = n_elements // len(ranks)
    sizes = (shard, n_elements) if kind == "_allgather_base" else (n_elements, shard)
    if kind == "allreduce":
        sizes = n_elements, n_elements
    told = {
        "Collective_name": kind,
        "In_msg_nelems": sizes[0],
        "Out_msg_nelems": sizes[1],
        "dtype": "Float",
        "Group_size": len(ranks),
        "Process_Group_Ranks": str(list(range(len(ranks)))),
    }
    end_ms = max(rank.device_ms for rank in ranks) + transfer_ms
    for rank in ranks:
        rank.drawing.op(f"c10d::{kind}_", rank.host_ms, rank.host_ms + LAUNCH_MS, tid=rank.thread)
        rank.drawing.gpu(
            KERNELS[kind], rank.host_ms, rank.device_ms, end_ms, tid=rank.thread, stream=NCCL_STREAM, **told
        )
        rank.host_ms += LAUNCH_MS
        rank.device_ms = end_ms
