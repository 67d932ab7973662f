"""Traces of a job with sharded parameters, of which everything is known: who computed late, by how much, in which unit.

Each unit gathers its parameters before its forward and its backward pass, and reduces its gradients behind the latter.
A collective begins on a rank when that rank has come to it, and ends on all ranks when the last one has, plus its
transfer. The host launches all work of a step at its beginning, and reads the loss at its end.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
COPY_MS, HOOK_MS = 0.4, 0.7
NAMED_UNITS = ("layers.0", "layers.1", "layers.2")
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


@dataclass
class _BlockingRank:
    """A rank on a CPU, whose only thread does all work and waits for each exchange."""

    drawing: Drawing
    rank: int
    n_ranks: int
    shard: int
    param_type: str
    at_ms: float = 0.0
    own_ms: float = 0.0

    def run(self, name: str, milliseconds: float) -> None:
        self.drawing.op(name, self.at_ms, self.at_ms + milliseconds, Input_Dims=[[8, 8], [8, 8]])
        self.at_ms += milliseconds

    def copy(self, name: str) -> None:
        self.run(name, COPY_MS)
        self.own_ms += COPY_MS

    def hook(self, what: str, unit: str) -> None:
        """Draw a hook that runs no operator, longer than a pause of the host."""
        with self.within(f"FSDP::{what} ({unit})"):
            self.at_ms += HOOK_MS
            self.own_ms += HOOK_MS

    @contextmanager
    def within(self, name: str, *, is_node: bool = False) -> Iterator[None]:
        begin_ms = self.at_ms
        yield
        draw = self.drawing.node if is_node else self.drawing.note
        draw(name, begin_ms, self.at_ms)

    def send(self, kind: str, milliseconds: float, of_type: str) -> None:
        group = range(self.shard) if kind != "allreduce" else range(0, self.n_ranks, self.shard)
        own = self.rank % self.shard if kind == "allreduce" else self.rank // self.shard * self.shard
        whole, part = 1_000_000, 1_000_000 // self.shard
        sizes = [whole, part] if kind == "_allgather_base" else [part, whole]
        told = {
            "Input_Dims": [[part]] if kind == "allreduce" else [[size] for size in sizes],
            "Input_type": [of_type] if kind == "allreduce" else [of_type, of_type],
            "Process_Group_Ranks": str([own + each for each in group]),
        }
        self.drawing.op(f"c10d::{kind}_", self.at_ms, self.at_ms + 0.1, **told)
        gloo = {"_allgather_base": "all_gather", "_reduce_scatter_base": "all_reduce"}.get(kind, "all_reduce")
        self.drawing.gloo(self.at_ms + 0.05, self.at_ms + milliseconds, kind=gloo, n=part)
        self.at_ms += milliseconds

    def gather(self, unit: str) -> None:
        if self.shard == 1:
            return
        with self.within(f"FSDP::all_gather ({unit})"):
            self.copy("fsdp::all_gather_copy_in")
            self.send("_allgather_base", GATHER_MS, self.param_type)
        with self.within(f"FSDP::all_gather_copy_out ({unit})"):
            self.copy("fsdp::split_with_sizes_copy")

    def forward(self, unit: str) -> None:
        with self.within(f"FSDP::pre_forward ({unit})"):
            self.gather(unit)
        self.run("aten::linear", FORWARD_MS)
        self.hook("post_forward", unit)

    def backward(self, unit: str, recompute_ms: float) -> None:
        with self.within("ViewBackward0", is_node=True), self.within(f"FSDP::pre_backward ({unit})"):
            self.gather(unit)
        with self.within("MmBackward0", is_node=True):
            if recompute_ms:
                self.hook("pre_forward", unit)
                self.run("aten::linear", recompute_ms)
                self.hook("post_forward", unit)
            self.run("aten::mm", BACKWARD_MS)
        with self.within("RegisterPostBackwardFunctionBackward", is_node=True):
            self.hook("post_backward_accumulate", unit)
            with self.within(f"FSDP::post_backward_reduce ({unit})"):
                self.copy("fsdp::chunk_cat")
                if self.shard > 1:
                    self.send("_reduce_scatter_base", REDUCE_MS, "float")
                if self.shard < self.n_ranks:
                    self.send("allreduce", REDUCE_MS, "float")
                self.copy("aten::copy_")


def write_blocking(
    folder: Path,
    *,
    n_ranks: int = 4,
    n_steps: int = 12,
    shard: int = 4,
    micro_batches: int = 1,
    recompute_ms: float = 0.0,
    param_type: str = "float",
) -> float:
    """Write a trace for each rank of a job on CPUs, whose ranks all do the same at the same times.

    Args:
        folder: Where to.
        n_ranks: Of the job, all on one machine.
        n_steps: Of the traces.
        shard: Ranks that share a unit; 1 as under `replicate`, which only averages gradients.
        micro_batches: Forward and backward passes of a step.
        recompute_ms: What the backward pass of each unit computes again.
        param_type: Type in which units are gathered.

    Returns:
        Milliseconds of a step in which `fully_shard` itself computes.
    """
    info = {"backend": "gloo", "world_size": n_ranks}
    for number in range(n_ranks):
        rank = _BlockingRank(
            Drawing({"distributedInfo": info | {"rank": number}, "host_name": "node0"}),
            number,
            n_ranks,
            shard,
            param_type,
        )
        for step in range(n_steps):
            with rank.within(f"ProfilerStep#{step}"):
                for _ in range(micro_batches):
                    with rank.within("FSDP::root_pre_forward"):
                        rank.at_ms += 0.01
                    for unit in NAMED_UNITS:
                        rank.forward(unit)
                    for unit in reversed(NAMED_UNITS):
                        rank.backward(unit, recompute_ms)
                with rank.within("Optimizer.step#AdamW.step"):
                    rank.run("aten::_fused_adamw_", UPDATE_MS)
        rank.drawing.write(folder, f"rank{number}.json")
    return rank.own_ms / n_steps
