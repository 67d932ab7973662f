"""Traces drawn by hand, event by event, in milliseconds."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAIN, AUTOGRAD, GLOO = 100, 101, (180, 181)
COMPUTE_STREAM, SIDE_STREAM, NCCL_STREAM = 7, 9, 20


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
        told = {key.replace("_", " "): value for key, value in args.items()} | {"correlation": self.launches}
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
