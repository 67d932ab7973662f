"""Traces as the PyTorch profiler (Kineto) writes them, of jobs of which everything is known.

truth = Truth(n_ranks=4, delays=(Delay("compute", rank=2, step=3, seconds=0.02),))
paths = write_job(tmp_path, truth, version="2.4", device="cuda")
lived = simulate(truth, "cuda")  # lived[rank][step].step is the RankStep to find
"""

import gzip
import json
from pathlib import Path
from typing import Any

from kineto_dialects import DIALECTS, Dialect
from kineto_truth import Bucket, Delay, Device, Lived, Truth, Work, simulate

__all__ = ["DIALECTS", "Bucket", "Delay", "Device", "Truth", "events_of", "simulate", "trace_of", "write_job"]

EPOCH_NS = 1_790_856_000_000_000_000
"""When the job began, since 1970."""
BASE_NS = 1_790_856_000_000_000_000 - 4_449_241_000_000_000
"""The origin of times that are not counted from 1970."""
COMPUTE_STREAM, NCCL_STREAM = 7, 20


def write_job(
    folder: Path, truth: Truth, *, version: str = "2.6", device: Device = "cuda", gz: bool = False
) -> list[Path]:
    """Write one trace per rank that left one; return the files, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in range(truth.n_ranks):
        if rank not in truth.missing:
            text = json.dumps(trace_of(truth, rank, version=version, device=device))
            path = folder / f"rank{rank}.1790856000000.pt.trace.json{'.gz' if gz else ''}"
            path.write_bytes(gzip.compress(text.encode(), 1) if gz else text.encode())
            paths.append(path)
    return paths


def trace_of(truth: Truth, rank: int, *, version: str = "2.6", device: Device = "cuda") -> dict[str, Any]:
    """Return a rank's whole trace, as its JSON says it."""
    dialect = DIALECTS[version]
    n_gpus = truth.gpus_per_node if device == "cuda" else 0
    gpus = [{"id": gpu, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108} for gpu in range(n_gpus)]
    trace: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": gpus}
    if truth.shapes:
        trace["record_shapes"] = 1
    backend = "nccl" if device == "cuda" else "gloo"
    if dialect.world != "none":
        trace["distributedInfo"] = {"backend": backend, "rank": rank, "world_size": truth.n_ranks}
    if dialect.world == "groups":
        all_ranks = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": f"{device}:{backend}"}
        all_ranks |= {"pg_size": truth.n_ranks, "ranks": list(range(truth.n_ranks))}
        trace["distributedInfo"] |= {"pg_count": 1, "pg_config": [all_ranks]}
    if dialect.host_name:
        trace["host_name"] = f"node{rank // truth.gpus_per_node}"
    trace["displayTimeUnit"] = "ms"
    if dialect.fine_times:
        trace["baseTimeNanoseconds"] = BASE_NS
    trace["traceEvents"] = events_of(truth, rank, dialect, device)
    trace["traceName"] = f"rank{rank}.json"
    return trace


def events_of(truth: Truth, rank: int, dialect: Dialect, device: Device) -> list[dict[str, Any]]:
    """Return a rank's events as profilers write them: not in the order of time, but the host's before the device's."""
    script = _Script(truth, rank, dialect, device)
    lived = simulate(truth, device)[rank]
    if truth.noise:
        script.around(lived)
    for step in lived:
        script.step(step)
    return sorted(
        script.events, key=lambda event: (event.get("pid") == script.gpu, event.get("cat") == dialect.runtime)
    )


class _Script:
    """Writes down the events of a rank."""

    def __init__(self, truth: Truth, rank: int, dialect: Dialect, device: Device):
        self.truth, self.rank, self.dialect, self.on_gpu = truth, rank, dialect, device == "cuda"
        self.events: list[dict[str, Any]] = []
        self.pid = 31_000 + rank
        self.autograd = self.pid + 77 if self.on_gpu else self.pid
        self.gpu = rank % truth.gpus_per_node
        self.id = self.correlation = self.sequence = 0

    def step(self, lived: Lived) -> None:
        work = {doing: [w for w in lived.work if w.doing == doing] for doing in {w.doing for w in lived.work}}
        if self.truth.marks:
            self.mark(f"ProfilerStep#{lived.step.number}", lived.host, work.get("copy", []) + work["optimize"])
        for load in work.get("load", []):
            self.span(self.dialect.annotation, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", load.host)
        for copy in work.get("copy", []):
            self.op("aten::to", copy.host, [[self.truth.batch_size, 700]])
            self.launched("cudaMemcpyAsync", self.dialect.memcpy, "Memcpy HtoD (Pinned -> Device)", copy)
        for sent in work.get("broadcast", []):
            self.collective("broadcast", sent, self.truth.buffer_count, self.pid)
        n = len(work["forward"]) // self.truth.micro_batches  # layers, and tensors
        for first in range(0, len(work["forward"]), n):
            self.forward(work["forward"][first : first + n])
            pairs = zip(work["backward"][first : first + n], work["accumulate"][first : first + n], strict=True)
            for backward, accumulate in pairs:
                reduced = [w for w in work["all_reduce"] if w.bucket == backward.bucket]
                last = backward.tensor == len(self.truth.buckets[backward.bucket].counts) - 1
                last = last and first + n == len(work["forward"])
                self.backward(backward, accumulate, reduced[0] if last else None)
        self.optimize(work["optimize"])
        for item in work.get("item", []):
            self.op("aten::item", item.host)
            self.op("aten::_local_scalar_dense", item.host)
            launch = (item.host[0], item.host[0] + 4e-6)
            self.launched("cudaMemcpyAsync", self.dialect.memcpy, "Memcpy DtoH (Device -> Pageable)", item, launch)
            self.span(self.dialect.runtime, "cudaStreamSynchronize", (launch[1], item.host[1]), self.runtime_args())

    def forward(self, layers: list[Work]) -> None:
        if self.dialect.names_forward:
            model = layers[:-1] or layers
            self.mark("DistributedDataParallel.forward", (model[0].host[0], model[-1].host[1]), model)
        for number, layer in enumerate(layers):
            dims = [[self.truth.batch_size, 700], [700, 700], [700]]
            loss = number == len(layers) - 1
            self.sequence += 1
            called = "aten::cross_entropy_loss" if loss else "aten::linear"
            self.op(called, layer.host, dims, sequence=self.sequence)
            self.op("aten::addmm", _inside(layer.host), dims, sequence=self.sequence)
            self.kernel("ampere_sgemm_128x64_tn", layer)

    def backward(self, backward: Work, accumulate: Work, reduced: Work | None) -> None:
        thread, ends_s = self.autograd, (reduced or accumulate).host[1]
        count = self.truth.buckets[backward.bucket].counts[backward.tensor]
        earlier = sum(len(bucket.counts) for bucket in self.truth.buckets[: backward.bucket]) + backward.tensor
        of_node = {"thread": thread, "sequence": self.sequence - earlier, "backward": True}
        if self.dialect.evaluate_function:
            wrapped = "autograd::engine::evaluate_function: "
            self.op(wrapped + self.dialect.node, backward.host, **of_node)
            self.op(wrapped + "torch::autograd::AccumulateGrad", (accumulate.host[0], ends_s), thread=thread)
        self.op(self.dialect.node, _inside(backward.host), **of_node)
        self.op("aten::mm", _inside(backward.host, 2), thread=thread)
        self.kernel("ampere_sgemm_64x64_nt", backward, thread)
        shape = [count // 10, 10] if count % 10 == 0 else [count]
        self.op("torch::autograd::AccumulateGrad", _inside(accumulate.host), [shape], thread=thread)
        self.kernel("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor>", accumulate, thread)
        if reduced:
            n = sum(self.truth.buckets[reduced.bucket].counts)
            self.collective("all_reduce", reduced, n, thread)

    def collective(self, kind: str, sent: Work, n: int, thread: int) -> None:
        """Write a collective as the host hands it over, and as NCCL's stream or Gloo's thread has it."""
        plain = kind.replace("_", "")
        if self.dialect.c10d_op:
            self.op(f"c10d::{plain}_", sent.host, [[[n]]], thread=thread)
        if not self.on_gpu:
            gloo = self.pid + 80 + max(sent.bucket, 0) % 2
            self.span(self.dialect.annotation, f"gloo:{kind}", sent.device, self.shapes([[n]]), gloo)
            return
        comms = self.comms(plain, n)
        if self.dialect.comms != "none":
            args = comms | ({"Is asynchronized op": True, "Rank": self.rank} if comms else {})
            self.op("record_param_comms", _inside(sent.host), [[n]], thread=thread, args=args)
        self.span(self.dialect.annotation, f"nccl:{kind}", _inside(sent.host), self.shapes([[n]]), thread)
        for number, name in enumerate(("cudaEventRecord", "cudaStreamWaitEvent")):
            moment_s = sent.host[0] + number * 4e-7
            self.span(self.dialect.runtime, name, (moment_s, moment_s + 3e-7), self.runtime_args(), thread)
        launch = (sent.host[0] + 1e-6, sent.host[1] - 1e-6)
        name = self.dialect.nccl if kind == "all_reduce" else self.dialect.nccl_broadcast
        self.launched("cudaLaunchKernelExC", self.dialect.kernel, name, sent, launch, thread, NCCL_STREAM, comms)
        if self.dialect.gpu_annotations:
            self.on_stream("gpu_user_annotation", f"nccl:{kind}", sent.device, NCCL_STREAM, {})

    def optimize(self, halves: list[Work]) -> None:
        self.mark("Optimizer.step#SGD.step", (halves[0].host[0], halves[-1].host[1]), halves)
        for half in halves:
            self.op("aten::_foreach_add_", half.host)
            self.kernel("void at::native::(anonymous namespace)::multi_tensor_apply_kernel", half)

    def around(self, lived: tuple[Lived, ...]) -> None:
        """Write what else is in a trace, and means nothing here: also the end of the step before the first one."""
        begin_s, end_s = lived[0].host[0], lived[-1].host[1]
        if self.on_gpu:
            told = {"device": self.gpu, "stream": COMPUTE_STREAM, "correlation": 9_999}
            self.on_stream(self.dialect.kernel, "sgd_kernel", (begin_s - 2e-3, begin_s - 1e-3), COMPUTE_STREAM, told)
        else:
            self.op("aten::add_", (begin_s - 2e-3, begin_s - 1e-3))
        self.span("Trace", "PyTorch Profiler (0)", (begin_s, end_s), {"Op count": 0}, "PyTorch Profiler", "Spans")
        for name, at_s in (("Iteration Start: PyTorch Profiler", begin_s), ("Record Window End", end_s)):
            self.events.append(
                {"ph": "i", "s": "g", "name": name, "pid": "Traces", "tid": "Trace", "ts": self.us(at_s)}
            )
        for key, value in (("process_name", {"name": "python3.11"}), ("process_labels", {"labels": "CPU"})):
            event = {"ph": "M", "name": key, "ts": self.us(begin_s), "pid": self.pid, "tid": 0, "args": value}
            self.events.append(event)
        self.span("python_function", "train.py(12): main", (begin_s, end_s), {"Python id": 1})
        self.span("overhead", "Activity Buffer Request", (begin_s, begin_s + 0.001), {}, 0, -1)
        for number, one in enumerate(lived):
            for moment in range(3):
                at_s = one.host[0] + (one.host[1] - one.host[0]) * moment / 3
                flow = {"id": number, "pid": self.pid, "tid": self.pid, "ts": self.us(at_s), "cat": "fwdbwd"}
                self.events.append(flow | {"ph": "s" if moment else "f", "name": "fwdbwd"})
                memory = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "s": "t", "args": {"Bytes": 4096}}
                self.events.append(memory | {"pid": self.pid, "tid": self.pid, "ts": self.us(at_s)})

    def mark(self, name: str, host: tuple[float, float], covered: list[Work]) -> None:
        """Write a range that the program named: on the host and, as newer profilers do, on the device."""
        self.span(self.dialect.annotation, name, host)
        if self.on_gpu and self.dialect.gpu_annotations and covered:
            covers = (covered[0].device[0] - 1e-9, covered[-1].device[1] + 1e-9)
            self.on_stream("gpu_user_annotation", name, covers, COMPUTE_STREAM, {})

    def kernel(self, name: str, work: Work, thread: int | None = None) -> None:
        if self.on_gpu:
            self.launched("cudaLaunchKernel", self.dialect.kernel, name, work, _inside(work.host, 3), thread)
        elif self.truth.noise:
            for number in range(3):
                self.op("aten::as_strided", _inside(work.host, 3 + number), thread=thread)

    def launched(self, call, cat, name, work: Work, launch=None, thread=None, stream=COMPUTE_STREAM, args=None) -> None:
        """Write the call that launched something on the GPU, and the thing itself."""
        called = self.runtime_args()
        self.span(self.dialect.runtime, call, launch or _inside(work.host), called, thread)
        told = {"device": self.gpu, "context": 1, "stream": stream, "correlation": called["correlation"]}
        if cat == self.dialect.memcpy:
            told |= {"bytes": 4 * 700 * self.truth.batch_size}
        self.on_stream(cat, name, work.device, stream, {self.dialect.external_id: self.id} | told | (args or {}))
        if self.truth.noise:
            for ph, at_s, pid, tid in (
                ("s", work.host[0], self.pid, self.pid),
                ("f", work.device[0], self.gpu, stream),
            ):
                flow = {"ph": ph, "id": called["correlation"], "cat": "ac2g", "name": "ac2g", "pid": pid, "tid": tid}
                self.events.append(flow | {"ts": self.us(at_s)})

    def runtime_args(self) -> dict[str, int]:
        """Return what a call of the CUDA runtime tells: which op it is part of, and a number of its own."""
        self.correlation += 1
        return {self.dialect.external_id: self.id, "cbid": 211, "correlation": 10_000 + self.correlation}

    def op(self, name, host, dims=None, *, thread=None, args=None, sequence=None, backward=False) -> None:
        self.id += 1
        told = {"External id": self.id, "Ev Idx": self.id} | (args or {}) | (self.shapes(dims) if dims else {})
        if sequence is not None:
            told |= {"Sequence number": sequence, "Fwd thread id": 1 if backward else 0}
        self.span(self.dialect.op, name, host, told, thread)

    def shapes(self, dims: list) -> dict[str, Any]:
        return {"Input Dims": dims, "Input type": ["float"] * len(dims)} if self.truth.shapes else {}

    def comms(self, kind: str, n: int) -> dict[str, Any]:
        """Return what newer profilers tell about a collective."""
        if self.dialect.comms in ("none", "bare"):
            return {}
        what = self.dialect.comms.removeprefix("msg ")
        told: dict[str, Any] = {"Collective name": kind, f"In msg {what}": n, f"Out msg {what}": n}
        told |= {"Group size": self.truth.n_ranks, "dtype": "Float"}
        if self.dialect.tells_ranks:
            told |= {"Process Group Name": "0", "Process Group Description": "default_pg"}
            told |= {"Process Group Ranks": str(list(range(self.truth.n_ranks)))}
        return told

    def on_stream(self, cat: str, name: str, device: tuple[float, float], stream: int, args: dict) -> None:
        self.span(cat, name, device, args, f"stream {stream}" if self.dialect.text_ids else stream, self.gpu)

    def span(self, cat: str, name: str, seconds: tuple[float, float], args=None, tid=None, pid=None) -> None:
        """Write that something took from one moment to another."""
        tid, pid = self.pid if tid is None else tid, self.pid if pid is None else pid
        begin_us, end_us = self.us(seconds[0]), self.us(seconds[1])
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": str(tid) if self.dialect.text_ids else tid}
        self.events.append(event | {"ts": begin_us, "dur": round(end_us - begin_us, 3), "args": args or {}})

    def us(self, seconds: float) -> float:
        """Return what the trace calls a moment."""
        ns = round(seconds * 1e9)
        return (EPOCH_NS - BASE_NS + ns) / 1000 if self.dialect.fine_times else (EPOCH_NS + ns) // 1000


def _inside(host: tuple[float, float], depth: int = 1) -> tuple[float, float]:
    """Return a range within a range, as calls nest."""
    margin_s = min((host[1] - host[0]) * 0.04, 1e-6) * depth
    return host[0] + margin_s, host[1] - margin_s
