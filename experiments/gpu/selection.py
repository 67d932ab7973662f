"""Selecting the largest entries: how long each method takes, beside one read of the vector, and whether it is right.

A row per size, type, density and method, then a row per kernel of each method on the largest vector. `torch.topk` gets
magnitudes that are ready; the others compute them. The floor is the time in which the GPU's memory can deliver the
vector once, at the bandwidth of a copy, whose reads and writes both count. The invariants are those of error feedback:
exactly k entries are taken, each once, and what is taken and what is left add up to the vector, to the last bit.

The methods run by kernels at all sizes, launched one by one. Then selections are measured as a run performs them, as
CUDA graphs: by kernels and by torch.
"""

import sys
from typing import get_args

import common

sys.path.append(str(common.ROOT / "benchmarks"))  # by itself, as other packages may have a folder of this name

LOG2_SIZES = (20, 22, 24, 26, 28)
DENSITIES = (0.001, 0.01)
DTYPES = ("float32", "bfloat16")
REPETITIONS = 5
COPY_NBYTES = 1 << 30


def run(part: common.Part) -> None:
    """Emit the bandwidth of a copy, then a row per method."""
    import torch

    from real.calibration import machine
    from real.kernels.topk import KERNELS_FROM

    device = torch.device(part.device)
    copy_Bps = _copy_Bps(device, 1 << 20 if part.dry_run else COPY_NBYTES)
    part.emit({"copy_Bps": copy_Bps})
    for log2_size in (12,) if part.dry_run else LOG2_SIZES:
        for dtype in DTYPES:
            values = torch.randn(2**log2_size, device=device).to(getattr(torch, dtype))
            for density in DENSITIES:
                for row in _methods(values, max(1, int(density * values.numel())), copy_Bps):
                    part.emit({"log2_size": log2_size, "dtype": dtype, "density": density, **row})
    seconds = machine.select_s(device, (12,) if part.dry_run else LOG2_SIZES)
    for count, (kernels_s, torch_s) in seconds.items():
        part.emit(
            {"recorded_log2_size": count.bit_length() - 1, "kernels_ms": 1e3 * kernels_s, "torch_ms": 1e3 * torch_s}
        )
    part.emit({"kernels_from": machine.fastest_from(seconds), "default_kernels_from": KERNELS_FROM})
    if not part.dry_run:
        values = torch.randn(2 ** LOG2_SIZES[-1], device=device)
        for row in _kernels(values, max(1, int(DENSITIES[-1] * values.numel()))):
            part.emit({"log2_size": LOG2_SIZES[-1], "dtype": DTYPES[0], "density": DENSITIES[-1], **row})


def _copy_Bps(device, nbytes: int) -> float:
    """Return the bytes that a copy in memory reads and writes per second."""
    import torch
    from topk import medians  # of benchmarks

    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = medians({"copy": lambda: target.copy_(source)}, REPETITIONS, n_calls=3, device=device)["copy"]
    return 2 * nbytes / copy_s


def _methods(values, k: int, copy_Bps: float) -> list[common.Row]:
    """Measure all methods in turns."""
    import torch
    from topk import chosen, medians  # of benchmarks

    from simdist.plan.ops import SelectMethod

    magnitudes = values.abs()
    methods = get_args(SelectMethod)
    runs = {method: lambda method=method: chosen(values, k, method) for method in methods}
    runs["torch.topk"] = lambda: torch.topk(magnitudes, k, sorted=False)
    median_s = medians(runs, REPETITIONS, n_calls=1, device=values.device)
    floor_s = values.nbytes / copy_Bps
    kth = torch.topk(magnitudes, k, sorted=False).values.min()
    rows: list[common.Row] = []
    for method, seconds in median_s.items():
        row: common.Row = {"method": method, "ms": 1e3 * seconds, "share_of_floor": floor_s / seconds}
        if method in methods:
            recall = (chosen(values, k, method).abs() >= kth).double().mean()
            row |= {"recall": float(recall), **_invariants(values, k, method)}
        rows.append(row)
    return rows


def _kernels(values, k: int) -> list[common.Row]:
    """Profile each method once: the time of each kernel."""
    import torch
    from topk import chosen  # of benchmarks
    from torch.profiler import ProfilerActivity, profile

    rows: list[common.Row] = []
    for method in ("mstopk", "dgc"):
        chosen(values, k, method)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            chosen(values, k, method)
            torch.cuda.synchronize()
        for event in profiler.key_averages():
            kernel_ms = event.self_device_time_total / 1e3
            if kernel_ms > 0:
                rows.append({"kernel_of": method, "kernel": event.key[:80], "calls": event.count, "ms": kernel_ms})
    return rows


def _invariants(values, k: int, method: str) -> common.Row:
    """Select as a plan does, with a residual, and look at what was taken and what was left."""
    import torch

    from real.buffers import transforms
    from real.buffers.memory import Memory
    from simdist.plan import Buffer, Plan, Select

    dtype = str(values.dtype).removeprefix("torch.")
    op = Select("grad", "top", "residual", k, method)
    buffers = (
        Buffer("grad", values.numel(), dtype, initialized=True),
        Buffer("residual", values.numel(), dtype, initialized=True),
        Buffer("top", k, dtype, sparse=True),
    )
    plan = Plan.from_steps("one", world_size=1, buffers=buffers, steps=[(op,)])
    memory = Memory(plan, values.device, {"grad", "residual", "top"})
    memory.dense("grad").copy_(values)
    memory.dense("residual").zero_()
    transforms.transform(memory, op, step=0, rank=0)
    top, rest = memory.sparse("top"), memory.dense("residual").clone()
    places = top.indices.long()
    taken = int(places.unique().numel())
    rest[places] += top.values
    return {"exactly_k": taken == k == top.values.numel(), "residual_conserved": torch.equal(rest, values)}
