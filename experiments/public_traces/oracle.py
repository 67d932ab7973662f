"""What a trace of the PyTorch profiler shows of a GPU's steps, read from the JSON directly.

It shares no code with `simdist.profiles`: plain Python, all events in memory, intervals swept one by one.

    A kernel belongs to the step in which the host launched it: the call with its correlation id. One whose call is not
    in the trace was launched with the one before it on its stream or, if it is the first there, before the trace began.
    A step begins on the device at its mark or, if that is later, when the device has computed all that the host
    launched before; it ends where the next one begins.
    Every instant of a step counts once: for computing if a kernel computes, else for communication if a kernel of NCCL
    runs, else for a copy if one runs, else it is a gap.
"""

import gzip
import json
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPUTE, COMMUNICATION, COPY = "kernel", "nccl", "copy"
_CATEGORIES = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime"}
_COLLECTIVES = {
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """What a trace shows, per step on average.

    Args:
        mark_s: From the first mark to the end of the last one, over their number.
        step_s: On the device.
        compute_s: A kernel computes.
        exposed_s: A kernel of NCCL runs, and none computes.
        copy_s: Only a copy runs.
        gap_s: Nothing runs.
        behind_s: By how much the device is behind the host at the marks, in the median.
        n_steps: Marks.
        n_before: Kernels and copies that were launched before the trace began.
        collectives: Kind -> how many the host issued in a step.
    """

    mark_s: float
    step_s: float
    compute_s: float
    exposed_s: float
    copy_s: float
    gap_s: float
    behind_s: float
    n_steps: int
    n_before: int
    collectives: dict[str, float]


def shown(path: Path) -> Shown:
    """Read a trace with marks and kernels of one GPU."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    content = json.loads(text, strict=False)
    events = content if isinstance(content, list) else content["traceEvents"]
    events = [{**each, "cat": _CATEGORIES.get(each["cat"], each["cat"])} for each in events if "cat" in each]
    marks = sorted(
        (each["ts"], each["ts"] + each["dur"], each["tid"])
        for each in events
        if each["name"].startswith("ProfilerStep#") and each["cat"] in ("user_annotation", "cpu_op", "Operator")
    )
    borders = [start for start, *_ in marks] + [marks[-1][1]]
    work, n_before = _work(events)
    edges = []
    for border in borders:
        before = [end for kind, launch, _, end in work if kind == COMPUTE and launch < border]
        edges.append(max([border, *before]))
    seconds = _swept(work, edges[0], edges[-1])
    n_steps = len(marks)
    behind = sorted(edge - border for edge, border in zip(edges, borders, strict=True))
    return Shown(
        mark_s=1e-6 * (borders[-1] - borders[0]) / n_steps,
        step_s=1e-6 * (edges[-1] - edges[0]) / n_steps,
        compute_s=1e-6 * seconds[COMPUTE] / n_steps,
        exposed_s=1e-6 * seconds[COMMUNICATION] / n_steps,
        copy_s=1e-6 * seconds[COPY] / n_steps,
        gap_s=1e-6 * seconds[None] / n_steps,
        behind_s=1e-6 * behind[len(behind) // 2],
        n_steps=n_steps,
        n_before=n_before,
        collectives=_collectives(events, borders),
    )


def _work(events: list[dict[str, Any]]) -> tuple[list[tuple[str, float, float, float]], int]:
    """Return the GPU's work as (what, launched, start, end), and how much of it was launched before the trace."""
    calls = {
        each["args"]["correlation"]: each["ts"]
        for each in events
        if each["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in each.get("args", {})
    }
    streams = defaultdict(list)
    for each in events:
        if each["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            args = each.get("args", {})
            launch = calls.get(args.get("correlation"))
            is_nccl = each["name"].lower().startswith(("nccl", "rccl"))
            kind = COPY if each["cat"] != "kernel" else COMMUNICATION if is_nccl else COMPUTE
            streams[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"], kind, launch))
    found, n_before = [], 0
    for of_stream in streams.values():
        last = float("-inf")
        for start, end, kind, launch in sorted(of_stream, key=lambda item: item[:2]):
            last = last if launch is None else launch
            n_before += last == float("-inf")
            found.append((kind, last, start, end))
    return found, n_before


def _swept(work: list[tuple[str, float, float, float]], first: float, last: float) -> dict[str | None, float]:
    """Return how long the most important thing that ran was each of these; None: nothing ran."""
    changes = [(first, 0, COMPUTE), (last, 0, COMPUTE)]
    for kind, _, start, end in work:
        if end > first and start < last:
            changes += [(max(start, first), 1, kind), (min(end, last), -1, kind)]
    seconds: dict[str | None, float] = {COMPUTE: 0.0, COMMUNICATION: 0.0, COPY: 0.0, None: 0.0}
    running: Counter[str] = Counter()
    before = first
    for at, change, kind in sorted(changes):
        top = next((each for each in (COMPUTE, COMMUNICATION, COPY) if running[each]), None)
        seconds[top] += at - before
        running[kind] += change
        before = at
    return seconds


def _collectives(events: list[dict[str, Any]], borders: list[float]) -> dict[str, float]:
    """Return how many collectives of each kind a step issues, by the annotations of NCCL's process group."""
    found: Counter[str] = Counter()
    outer: dict[Any, float] = {}
    for each in sorted((each for each in events if each["name"].startswith("nccl:")), key=lambda item: item["ts"]):
        if each["cat"] != "user_annotation" or each["ts"] < outer.get(each["tid"], 0.0):
            continue
        outer[each["tid"]] = each["ts"] + each["dur"]
        plain = each["name"].lower().replace("_", "")
        if bisect_right(borders, each["ts"]) and bisect_left(borders, each["ts"]) < len(borders):
            found[next((kind for part, kind in _COLLECTIVES.items() if part in plain), "other")] += 1
    return {kind: count / (len(borders) - 1) for kind, count in sorted(found.items())}
