"""Step times by batch size and precision, beside what the presets and two batch sizes predict.

A row per model, precision and batch size: the median step (forward, backward and update by SGD with momentum) and the
time per sample. Two sizes, the largest and a quarter of it, tell what the GPU takes. The step of one sample is what the
host takes. Steps of the other sizes are predicted. A batch that does not fit is a row that says so. No larger ones are
tried after it, nor after a step of half a second.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import common
import jobs

MODELS = ("resnet50", "bert-large", "gpt2-medium")
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# What people train with comes first, as the time limit may cut the rest off.
PRECISIONS = ("bf16", "tf32", "fp32")
MOST_S = 0.3  # of measuring a point; one step after those that warm up in any case
MOST_STEPS, WARM_UP_STEPS = 10, 2
FULL = ("out of memory", "CUBLAS_STATUS", "CUDNN_STATUS", "unable to find an engine")  # what errors say then
LONGEST_STEP_S = 0.5  # after a step this long, larger batches are not tried


def run(part: common.Part) -> None:
    """Emit a row per point."""
    import torch

    from real import models

    device = torch.device(part.device)
    cluster = None if part.dry_run else jobs.preset()
    batch_sizes = (1, 2, 4, 8) if part.dry_run else BATCH_SIZES
    kept = {"device": torch.device("cpu"), "dtype": torch.float32, "seed": 0}
    made: dict[str, models.TrainingJob] = {}  # each made once, as drawing so many numbers takes seconds
    for precision in ("fp32",) if part.dry_run else PRECISIONS:
        for model in ("mlp", "gpt-nano") if part.dry_run else MODELS:
            if model not in made:
                made[model] = models.build_job(model, batch_size=batch_sizes[-1], **kept)
            about = {"model": model, "precision": precision, "preset": cluster}
            rows = [about | row for row in _curve(made[model], precision, batch_sizes, device)]
            predict(rows)
            for row in rows:
                part.emit(row)


def _curve(job, precision: str, batch_sizes: tuple[int, ...], device) -> Iterator[dict[str, Any]]:
    """Yield a row per batch size, until one does not fit or takes long."""
    import torch

    from real.programs.precision import compute_in

    compute_in(precision)
    inputs, targets = job.batch(0, 0)
    module = job.module.to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    for batch_size in batch_sizes:
        try:
            batch = inputs[:batch_size].to(device), targets[:batch_size].to(device)
            seconds = _step_s(module, job.loss, optimizer, batch, precision)
        except RuntimeError as error:  # libraries of CUDA have their own words for it
            if not any(words in str(error) for words in FULL):
                raise
            yield {"batch_size": batch_size, "step_ms": None, "ms_per_sample": None, "note": "does not fit"}
            break
        yield {"batch_size": batch_size, "step_ms": 1e3 * seconds, "ms_per_sample": 1e3 * seconds / batch_size}
        if seconds > LONGEST_STEP_S and device.type == "cuda":
            break
    optimizer.zero_grad()
    module.to("cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _step_s(module, loss, optimizer, batch, precision: str) -> float:
    """Return the median seconds of a step."""
    import torch

    inputs, targets = batch

    def step() -> float:
        began_s = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
            value = loss(module(inputs), targets)
        value.backward()
        optimizer.step()
        if inputs.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    for _ in range(WARM_UP_STEPS):
        step()
    measured: list[float] = []
    while not measured or (sum(measured) < MOST_S and len(measured) < MOST_STEPS):
        measured.append(step())
    return median(measured)


def predict(rows: Sequence[common.Row]) -> None:
    """Predict the steps of a curve with today's model, and put the times into its rows.

    Columns:
        predicted_ms: By the presets; None where no source states a utilization.
        two_sizes_ms: From two batch sizes; None for those, for one sample, and if too few were measured.
    """
    measured = [row for row in rows if row["step_ms"] is not None]
    step_s = {row["batch_size"]: row["step_ms"] / 1e3 for row in measured}
    by_two = by_two_sizes(step_s, {"preset": measured[0]["model"]}) if measured else {}
    for row in measured:
        workload = {"preset": row["model"], "batch_size": row["batch_size"], "precision": row["precision"]}
        row["predicted_ms"] = None if row["preset"] is None else _simulated_ms(workload, row["preset"])
        row["two_sizes_ms"] = by_two.get(row["batch_size"])


def by_two_sizes(step_s: Mapping[int, float], workload: Mapping[str, object]) -> dict[int, float | None]:
    """Return batch size -> milliseconds of a step that two other sizes and the step of one sample predict.

    Args:
        step_s: Batch size -> measured seconds of a step.
        workload: Keys of its tensors.
    """
    times = times_of_two_sizes(step_s)
    given = {1, *(each["batch_size"] for each in times["step_times"])} if times else step_s.keys()
    asked = [size for size in step_s if size not in given]
    return {size: _simulated_ms({**workload, "batch_size": size, **times}, "ideal") for size in asked}


def times_of_two_sizes(step_s: Mapping[int, float]) -> dict[str, Any]:
    """Return the keys of a workload that two batch sizes and the step of one sample tell.

    Args:
        step_s: Batch size -> seconds of a step with its update.

    Returns:
        `step_times` of the GPU, and `launches`. Nothing if there are no such sizes. If the line of the two sizes lies
        above the step of one sample, the GPU bounds that, too, and it is a third size.
    """
    largest = max(step_s, default=0)
    sizes: tuple[int, ...] = (largest // 4, largest)
    if 1 not in step_s or sizes[0] <= 1 or sizes[0] not in step_s:
        return {}
    per_sample_s = (step_s[largest] - step_s[sizes[0]]) / (largest - sizes[0])
    if step_s[sizes[0]] - per_sample_s * (sizes[0] - 1) > step_s[1]:  # the GPU never takes longer than a step
        sizes = (1, *sizes)
    return {
        "step_times": [{"batch_size": size, "time": f"{step_s[size]!r} s"} for size in sizes],
        "optimize": "0 s",  # they have it
        "launches": f"{step_s[1]!r} s",
    }


def _simulated_ms(workload: Mapping[str, object], cluster: str) -> float | None:
    """Return the milliseconds of a step on one GPU of a preset; None where no source states a utilization."""
    import yaml

    from simdist import scenario
    from simdist.errors import ScenarioError
    from simdist.runs import building

    document = {
        "cluster": {"preset": cluster, "nodes": 1, "gpus_per_node": 1},
        "workload": dict(workload),
        "schedules": [{"kind": "sync"}],
        "steps": 1,
    }
    try:
        return 1e3 * float(building.simulate(scenario.loads(yaml.safe_dump(document))).makespan_s)
    except ScenarioError:
        return None
