"""Published memory of sharded training, and what the simulator counts for it.

What a block leaves for its backward pass follows Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models, arXiv 2205.05198, section 4.1, with other terms where the model differs: flash attention keeps no
matrix of scores but a number for each head; there is no dropout; an MLP with a gate keeps the outputs of both matrices,
that of the activation function and their product; keys and values have fewer heads.

With checkpointing, what stays of the blocks is there together with the larger of two: what the loss needs, and what one
block computes again. The first is freed before the second begins.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rates_of_rows import OTHER_MODELS

from simdist.plan import ops
from simdist.runs.building import Built, build
from simdist.runs.memory import memory_of
from simdist.scenario import Scenario, load

GIB = 2**30
HIDDEN = 4096
KEYS = 1024
INTERMEDIATE = 14336
HEADS = 32
LAYERS = 32
VOCABULARY = 128256
"""Of Llama 3 8B, which both sources trained."""
LOGSUMEXP = 4 * HEADS
"""Bytes for each token that flash attention keeps of the scores."""
BLOCK = 2 * (6 * HIDDEN + 2 * KEYS + 4 * INTERMEDIATE) + LOGSUMEXP
"""Bytes for each token in bf16: inputs of both norms, of queries, keys and values and of the MLP; queries, keys and
values; the output of attention; four of the MLP."""
INPUT = 2 * HIDDEN
"""Bytes for each token of the input of a block."""
EVERY_SECOND = 2 * (4 * HIDDEN + KEYS + INTERMEDIATE) + LOGSUMEXP
"""Bytes for each token under selective checkpointing: the input, the output of attention, and of the products every
second one, of queries, values, the gate and the last."""


@dataclass(frozen=True)
class Published:
    """A published peak.

    Args:
        source: Of `torchtitan`, `KempnerForge` and `InternEvo`.
        name: What tells it from others of the source.
        gpus: Number of GPUs.
        batch_size: Sequences of a pass.
        micro_batches: Passes of a step.
        gib: The peak.
        model: Of `OTHER_MODELS`, for which the simulator counts the activations; Llama 3 8B if empty.
    """

    source: str
    name: str
    gpus: int
    batch_size: int
    micro_batches: int
    gib: float
    model: str = ""

    def scenario(self) -> Scenario:
        """Return the job as a scenario."""
        job = JOBS[self.source]
        sequence = job["sequence"]
        workload: dict[str, Any] = {
            "preset": "llama3-8b",
            "transformer": {**OTHER_MODELS.get(self.model, {}), "sequence": sequence},
            "dtype": job["dtype"],
            "batch_size": self.batch_size,
            "recompute": job["recompute"],
            **job.get("workload", {}),
        }
        if not self.model:
            largest = max(job["per_logit"] * VOCABULARY, BLOCK)
            workload["activation_nbytes"] = sequence * (LAYERS * job["kept"] + 2 * INPUT + largest)
        if self.micro_batches > 1:
            workload["micro_batches"] = self.micro_batches
        gpus_per_node = min(self.gpus, 8)
        cluster = {"preset": "dgx-h100", "nodes": self.gpus // gpus_per_node, "gpus_per_node": gpus_per_node}
        return load(
            {
                "name": f"{self.source} {self.gpus}",
                "cluster": cluster,
                "workload": workload,
                "host": {"run_ahead_steps": None},
                "schedules": [{"kind": "fsdp", **SCHEDULE, **job["schedule"]}],
                "steps": 3,
            }
        )


SCHEDULE = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "wrap": "blocks", "reshard_after_forward": True}
JOBS: dict[str, dict[str, Any]] = {
    "torchtitan": {
        "sequence": 8192,
        "dtype": "float32",
        "recompute": 0.28,
        "kept": EVERY_SECOND,
        # The loss takes logits in fp32. As its backward pass begins there are log-probabilities and two gradients.
        "per_logit": 12,
        "schedule": {"keep_last_unit": True},
    },
    "KempnerForge": {
        "sequence": 4096,
        "dtype": "bfloat16",  # parameters and the states of AdamW too (model.to(dtype=param_dtype))
        "recompute": 1,
        "kept": INPUT,
        # The loss takes logits in bf16, which stay: logits, log-probabilities and two gradients.
        "per_logit": 8,
        "schedule": {"accumulation": "local"},
    },
    "InternEvo": {
        "sequence": 2048,
        "dtype": "bfloat16",
        "recompute": 1,
        # fsdp_optimizer.py: copies of parameters and gradients in fp32; AdamW: two moments, and torch's update of many
        # tensors at once makes one more number.
        "workload": {"optimizer": "adamw", "optimizer_size": "20 B"},
        "schedule": {},
    },
}
GB = 1e9 / GIB
ROWS = (
    Published("torchtitan", "compiled", 8, 2, 1, 77.0),
    Published("torchtitan", "compiled", 128, 2, 1, 62.0),
    Published("torchtitan", "not compiled", 8, 2, 1, 82.4),
    Published("torchtitan", "not compiled", 128, 2, 1, 67.0),
    Published("KempnerForge", "compiled", 2, 2, 4, 62.4),
    Published("KempnerForge", "compiled", 4, 4, 2, 61.1),
    *(
        Published("InternEvo", f"{size}B", gpus, 1, 4, round(gb * GB, 1), f"internlm-{size}b")
        for size, gpus, gb in ((7, 3, 72), (7, 4, 56), (7, 5, 49), (7, 6, 39), (20, 8, 78), (20, 16, 40))
    ),
)


def reduced_nbytes(built: Built) -> int:
    """Return the bytes of the reduced gradients, for which the allocator keeps memory of their own stream."""
    plan = built.plan
    names = {name for body in plan.bodies for op in body if isinstance(op, ops.Optimize) for name in op.grads}
    return sum(buffer.nbytes for buffer in plan.buffers if buffer.name in names)


def memory_table() -> Iterator[str]:
    """Yield the peaks, published and simulated."""
    yield (
        "| source | GPUs | batch | published, GiB | parameters, optimizer | gradients | units, buffers | activations "
        "| simulated peak | error | with reduced gradients | error |"
    )
    for row in ROWS:
        scenario = row.scenario()
        built = build(scenario, scenario.schedules[0])
        memory = memory_of(scenario, built)
        at_peak = memory.at_peak
        passes = f" x {row.micro_batches}" if row.micro_batches > 1 else ""
        peaks = [memory.peak_nbytes, memory.peak_nbytes + reduced_nbytes(built)]
        if row.source != "torchtitan":
            del peaks[1]
        parts = [
            at_peak["parameters"] + at_peak["optimizer"],
            at_peak["gradients"],
            at_peak["units"] + at_peak["communication"] + at_peak["other"],
            at_peak["activations"],
        ]
        cells = [f"{row.source}, {row.name}", str(row.gpus), f"{row.batch_size}{passes}", f"{row.gib}"]
        cells += [f"{nbytes / GIB:.1f}" for nbytes in parts]
        for nbytes in peaks:
            cells += [f"{nbytes / GIB:.1f}", f"{nbytes / GIB / row.gib - 1:+.1%}"]
        cells += ["", ""] * (2 - len(peaks))
        yield f"| {' | '.join(cells)} |"
