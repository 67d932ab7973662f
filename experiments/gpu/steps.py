"""Step times by batch size and precision, beside what the presets predict.

A row per model, precision and batch size: the median step (forward, backward and update by SGD with momentum) and the
time per sample. The presets assume that the time per sample does not depend on the batch size. Where a batch does not
fit, the row says so, and larger ones are not tried.
"""

import common

MODELS = ("resnet50", "bert-large", "gpt2-medium")
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# What people train with comes first, as the time limit may cut the rest off.
PRECISIONS = ("bf16", "tf32", "fp32")
MOST_S = 0.6  # of measuring a point; one warmed-up step in any case
MOST_STEPS, WARM_UP_STEPS = 20, 2
# Name of a GPU -> cluster preset with its data sheet.
CLUSTERS = {
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "dgx-b200",
    "A100": "dgx-a100",
    "V100": "v100x8-25gbit",
    "T4": "gcp-t4x4-32gbit",
}


def run(part: common.Part) -> None:
    """Emit a row per point."""
    import torch

    device = torch.device(part.device)
    name = torch.cuda.get_device_name() if part.device == "cuda" else "CPU"
    cluster = next((preset for gpu, preset in CLUSTERS.items() if gpu in name), None)
    for precision in ("fp32",) if part.dry_run else PRECISIONS:
        for model in ("mlp", "gpt-nano") if part.dry_run else MODELS:
            for row in _curve(model, precision, (1, 4) if part.dry_run else BATCH_SIZES, device):
                batch_size = int(str(row["batch_size"]))
                predicted_s = _predicted_s(model, precision, batch_size, cluster) if cluster else None
                row["predicted_ms"] = None if predicted_s is None else 1e3 * predicted_s
                part.emit({"model": model, "precision": precision, "preset": cluster, **row})


def _curve(model: str, precision: str, batch_sizes: tuple[int, ...], device):
    """Yield a row per batch size, until one does not fit."""
    import torch

    from real import models

    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    job = models.build(model, batch_size=batch_sizes[-1], device=device, dtype=torch.float32, seed=0)
    inputs, targets = job.batch(0, 0)
    for batch_size in batch_sizes:
        try:
            seconds = _step_s(job, inputs[:batch_size].to(device), targets[:batch_size].to(device), precision, device)
        except torch.OutOfMemoryError:
            job.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            yield {"batch_size": batch_size, "step_ms": None, "ms_per_sample": None, "note": "does not fit"}
            return
        yield {"batch_size": batch_size, "step_ms": 1e3 * seconds, "ms_per_sample": 1e3 * seconds / batch_size}


def _step_s(job, inputs, targets, precision: str, device) -> float:
    """Return the median seconds of a step."""
    import time
    from statistics import median

    import torch

    def step() -> float:
        began_s = time.perf_counter()
        job.optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = job.loss(job.module(inputs), targets)
        loss.backward()
        job.optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    for _ in range(WARM_UP_STEPS):
        step()
    measured: list[float] = []
    while not measured or (sum(measured) < MOST_S and len(measured) < MOST_STEPS):
        measured.append(step())
    return median(measured)


def _predicted_s(model: str, precision: str, batch_size: int, cluster: str) -> float | None:
    """Return the seconds of a step on one GPU of a preset; None where no source states a utilization."""
    import yaml

    from simdist import scenario
    from simdist.errors import ScenarioError
    from simdist.runs import building

    document = {
        "cluster": {"preset": cluster, "nodes": 1, "gpus_per_node": 1},
        "workload": {"preset": model, "batch_size": batch_size, "precision": precision},
        "schedules": [{"kind": "sync"}],
        "steps": 1,
    }
    try:
        return float(building.simulate(scenario.loads(yaml.safe_dump(document))).makespan_s)
    except ScenarioError:
        return None
