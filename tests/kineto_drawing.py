"""Traces drawn by hand, event by event, in milliseconds."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simdist.errors import TraceError
from simdist.profiles.steps.model import RankProfile
from simdist.profiles.steps.ranks import profile_rank

MAIN, AUTOGRAD, GLOO = 100, 101, (180, 181)
COMPUTE_STREAM, SIDE_STREAM, NCCL_STREAM = 7, 9, 20
GPU = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}, {"id": 1, "name": "NVIDIA H100"}],
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
}
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
TOLD = {
    "Collective_name": "allreduce",
    "In_msg_nelems": 1000,
    "Out_msg_nelems": 1000,
    "dtype": "BFloat16",
    "Group_size": 8,
    "Process_Group_Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
}


@dataclass
class Drawing:
    """The events of a trace, so far."""

    header: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    launches: int = 0

    def op(self, name: str, begin: float, end: float, *, tid: int = MAIN, cat: str = "cpu_op", **args: Any) -> None:
        """Draw an operator or, with another category, whatever else the host did."""
        told = {key.replace("_", " "): value for key, value in args.items()}
        self._event(cat, name, begin, end, 100, tid, told)

    def note(self, name: str, begin: float, end: float, *, tid: int = MAIN, **args: Any) -> None:
        """Draw an annotation."""
        self.op(name, begin, end, tid=tid, cat="user_annotation", **args)

    def call(self, name: str, begin: float, end: float, *, tid: int = MAIN) -> None:
        """Draw a call of the CUDA runtime that launches nothing."""
        self.op(name, begin, end, tid=tid, cat="cuda_runtime", correlation=0)

    def gpu(
        self,
        name: str,
        launch: float | None,
        begin: float,
        end: float,
        *,
        tid: int = MAIN,
        stream: int = COMPUTE_STREAM,
        cat: str = "kernel",
        **args: Any,
    ) -> None:
        """Draw what the GPU did, and the call that launched it unless that is missing."""
        self.launches += 1
        told = {"correlation": self.launches} | {key.replace("_", " "): value for key, value in args.items()}
        if launch is not None:
            self.op("cudaLaunchKernel", launch, launch + 0.005, tid=tid, cat="cuda_runtime", correlation=self.launches)
        self._event(cat, name, begin, end, 0, stream, told)

    def node(self, name: str, begin: float, end: float, *, tid: int = MAIN) -> None:
        """Draw a node of the backward graph."""
        self.op(f"autograd::engine::evaluate_function: {name}", begin, end, tid=tid)

    def gradient(self, begin: float, end: float, shape: list[int], *, issue: float | None = None, tid: int = MAIN):
        """Draw a gradient that becomes ready within the first half, and maybe fills a bucket."""
        self.node("torch::autograd::AccumulateGrad", begin, end, tid=tid)
        half = (begin + end) / 2
        args = {"Input_Dims": [shape], "Input_type": ["float"]}
        self.op("torch::autograd::AccumulateGrad", begin, half, tid=tid, **args)
        if issue is not None:
            self.op("c10d::allreduce_", issue, end, tid=tid, Input_Dims=[[[100]]], Input_type=["TensorList"])

    def gloo(self, begin: float, end: float, thread: int = 0, *, kind: str = "all_reduce", n: int = 100) -> None:
        """Draw a collective on a thread of gloo's."""
        self.note(f"gloo:{kind}", begin, end, tid=GLOO[thread], Input_Dims=[[n]], Input_type=["float"])

    def write(self, folder: Path, name: str = "rank0.json") -> Path:
        """Write the trace, later events first: no reader may count on their order."""
        path = folder / name
        path.write_text(json.dumps(self.header | {"traceEvents": self.events[::-1]}))
        return path

    def _event(self, cat: str, name: str, begin: float, end: float, pid: int, tid: int, args: dict[str, Any]) -> None:
        times = {"ts": round(1e3 * begin, 3), "dur": round(1e3 * (end - begin), 3)}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args})


def draw_step(
    draw: Drawing, number: int, *, reads_loss: bool = True, gloo_wakes_ms: float | None = None, **told
) -> None:
    """Draw a step of 100 ms on the host, of which its GPU is busy or waiting until 90.1 ms.

    With `gloo_wakes_ms`, threads of gloo reduce gradients, as long as NCCL does without. The host waits for that, and
    launches the update so much later.
    """
    at = 100.0 * number
    nccl = {"tid": AUTOGRAD, "stream": NCCL_STREAM} | (told or TOLD)
    draw.note(f"ProfilerStep#{number}", at, at + 100)
    draw.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, at + 10)
    draw.op("aten::to", at + 10, at + 10.2)
    draw.gpu("Memcpy HtoD (Pinned -> Device)", at + 10.1, at + 10.2, at + 12, cat="gpu_memcpy")
    draw.note("DistributedDataParallel.forward", at + 10.25, at + 10.5)
    draw.gpu("sgemm", at + 10.3, at + 12, at + 20)
    draw.gpu("sgemm", at + 10.4, at + 20, at + 30)
    draw.node("AddmmBackward0", at + 50, at + 50.3, tid=AUTOGRAD)
    draw.gpu("sgemm", at + 50.1, at + 50.2, at + 60, tid=AUTOGRAD)
    draw.gradient(at + 50.3, at + 50.6, [10], issue=at + 50.5, tid=AUTOGRAD)
    if gloo_wakes_ms is None:
        draw.gpu(ALL_REDUCE, at + 50.55, at + 60.05, at + 75, **nccl)
        draw.gpu(ALL_REDUCE, at + 51.3, at + 75, at + 85, **nccl)
    else:
        draw.gloo(at + 60.05, at + 75)
        draw.gloo(at + 75, at + 85)
    draw.node("AddmmBackward0", at + 50.7, at + 51, tid=AUTOGRAD)
    draw.gpu("sgemm", at + 50.8, at + 60, at + 68, tid=AUTOGRAD)
    draw.gradient(at + 51, at + 51.4, [10, 10], issue=at + 51.25, tid=AUTOGRAD)
    updates = at + 52 if gloo_wakes_ms is None else at + 85 + gloo_wakes_ms
    draw.note("Optimizer.step#AdamW.step", updates, updates + 1)
    draw.gpu(
        "multi_tensor_apply_kernel",
        updates + (0.5 if gloo_wakes_ms is None else 0.01),
        max(at + 85.02, updates + 0.02),
        at + 90,
    )
    if reads_loss:
        draw.op("aten::item", updates + 1.1, at + 90.3)
        draw.gpu("Memcpy DtoH (Device -> Pageable)", updates + 1.2, at + 90, at + 90.1, cat="gpu_memcpy")
        draw.call("cudaStreamSynchronize", updates + 1.3, at + 90.2)


def profile_without_some_events(draw: Drawing, rng: random.Random, folder: Path) -> tuple[RankProfile | None, str]:
    """Remove events at random. Return what is read of the others, or None and why it is refused."""
    gone = rng.sample(sorted({event["name"] for event in draw.events}), rng.randrange(4))
    lost = rng.random() * 0.3
    draw.events = [event for event in draw.events if event["name"] not in gone and rng.random() > lost]
    path = draw.write(folder)
    try:
        return profile_rank(path), ""
    except TraceError as error:
        refusal = str(error)
    assert refusal.startswith(f"{path}: ")
    return None, refusal.removeprefix(f"{path}: ")
