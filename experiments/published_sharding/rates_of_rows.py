"""Published rates of sharded training, and what the simulator and two plain formulas predict for them.

A series is a model on the machines of a family. Its utilization is solved for from one row, on the fewest GPUs: the
simulated step then takes as long as the measured one. The other rows of the series are predicted.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from simdist.cost.topology import LinkCost
from simdist.runs.building import build
from simdist.scenario import Scenario, load
from simdist.studies.measuring import measure

HERE = Path(__file__).parent
STEPS = 2
N_SEEDS = 8
TOLERANCE = 1e-6
"""Of the calibrated step, relative."""
FASTEST = 0.5
SLOWEST = 20.0
"""Ends of 1 / utilization."""
SHARING = {"zero1": True, "zero1-node": "node"}
"""Ranks that share the optimizer's state under ZeRO-1."""


def gpt3(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Return a model of Brown et al., Language Models are Few-Shot Learners, arXiv 2005.14165, table 2.1."""
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "intermediate": 4 * hidden,
        "vocabulary": 50257,
        "gated": False,
        "norm": "layer",
        "biases": "all",
        "fused_qkv": True,
        "tied": True,
    }


OTHER_MODELS = {
    "gpt3-2.7b": gpt3(32, 2560, 32),
    "gpt3-6.7b": gpt3(32, 4096, 32),
    "gpt3-13b": gpt3(40, 5120, 40),
    # InternLM/InternEvo, configs/7B_sft.py; internlm/model/modules/mlp.py rounds 8/3 x 4096 up to a multiple of 256.
    # Biases of the attention, 0.007 % of the parameters, are left out.
    "internlm-7b": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 32,
        "intermediate": 11008,
        "vocabulary": 103168,
        "gated": True,
        "norm": "rms",
        "biases": "none",
        "fused_qkv": True,
        "positions": 0,
        "tied": False,
    },
    # configs/_base_/models/internlm_20B.py
    "internlm-20b": {
        "layers": 60,
        "hidden": 5120,
        "heads": 40,
        "kv_heads": 40,
        "intermediate": 13824,
        "vocabulary": 103168,
        "gated": True,
        "norm": "rms",
        "biases": "none",
        "fused_qkv": True,
        "positions": 0,
        "tied": False,
    },
    # Roziere et al., Code Llama, arXiv 2308.12950; config.json of codellama/CodeLlama-34b-hf
    "llama2-34b": {
        "layers": 48,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "intermediate": 22016,
        "vocabulary": 32000,
        "gated": True,
        "norm": "rms",
        "biases": "none",
        "fused_qkv": False,
        "positions": 0,
        "tied": False,
    },
}


@dataclass(frozen=True)
class Published:
    """A published rate.

    Args:
        family: Machines, in families.yaml.
        model: Name of a workload preset, or of `OTHER_MODELS`.
        gpus: Number of GPUs.
        batch_size: Sequences of a GPU and pass.
        micro_batches: Passes of a step.
        sequence: Tokens of a sequence.
        sharding: `full`, `grad`, `hybrid`, `zero1` or `zero1-node`.
        recompute: Share of the blocks' forward pass that the backward pass repeats.
        compiled: The model was compiled.
        tokens_per_s: Of a GPU.
        network: Bandwidth of a card, instead of the family's.
        ring_step: Of the network.
    """

    family: str
    model: str
    gpus: int
    batch_size: int
    micro_batches: int
    sequence: int
    sharding: str
    recompute: float
    compiled: bool
    tokens_per_s: float
    network: str = ""
    ring_step: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of a GPU and step."""
        return self.batch_size * self.micro_batches * self.sequence

    @property
    def step_s(self) -> float:
        """Measured seconds of a step."""
        return self.tokens / self.tokens_per_s

    @property
    def series(self) -> tuple[str, str, bool, tuple[int, int]]:
        """Rows with one utilization: those of a model, and of a batch where its size decides how well kernels run."""
        family = families()[self.family]
        model = family.get("calibrated_on") or self.model
        batch = (self.batch_size, self.sequence) if family.get("series_by_batch") else (0, 0)
        return self.family, model, self.compiled, batch

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a machine that train."""
        return min(self.gpus, families()[self.family]["cluster"].get("gpus_per_node", 8))

    def scenario(self, utilization: float, measured_on: int = 0) -> Scenario:
        """Return the job as a scenario.

        Args:
            utilization: Of each GPU.
            measured_on: GPUs that reached it together; 0: those of this row. If there are more now, each step also
                waits for the slowest of them, by the typical noise of published machines.
        """
        family = families()[self.family]
        stated = {"bandwidth": self.network, "ring_step": self.ring_step}
        network = family["cluster"].get("network", {}) | {key: text for key, text in stated.items() if text}
        other = OTHER_MODELS.get(self.model)
        workload: dict[str, Any] = {"preset": "llama2-70b" if other else self.model}
        workload["transformer"] = {**(other or {}), "sequence": self.sequence}
        if self.model.startswith(("mpt", "gpt3")):
            workload["transformer"]["positions"] = self.sequence
        workload |= {"batch_size": self.batch_size, "utilization": utilization, "recompute": self.recompute}
        workload["utilization_ranks"] = measured_on or self.gpus
        if self.micro_batches > 1:
            workload["micro_batches"] = self.micro_batches
        schedule = {"kind": "fsdp", **family["schedule"]}
        if self.sharding in SHARING:
            schedule["shared_update"] = SHARING[self.sharding]
        if self.sharding == "grad":
            schedule["reshard_after_forward"] = False
        if self.sharding == "hybrid":
            schedule |= {"kind": "hsdp", "shard": self.gpus_per_node}
        sizes = {"nodes": self.gpus // self.gpus_per_node, "gpus_per_node": self.gpus_per_node}
        cluster = {**family["cluster"], **({"network": network} if network else {}), **sizes}
        return load(
            {
                "name": f"{self.family} {self.model} {self.gpus}",
                "cluster": cluster,
                "workload": workload,
                "disturbances": [{"kind": "interference", "typical": True}],
                "host": {"run_ahead_steps": None},
                "schedules": [schedule],
                "steps": STEPS,
            }
        )


@dataclass(frozen=True)
class Prediction:
    """A row beside what is predicted for it.

    Args:
        row: The row.
        base: The row that its series is calibrated on.
        utilization: That of the series.
        simulated_per_s: Tokens per second and GPU, simulated.
        linear_per_s: By linear scaling of the base row, per FLOP.
        summed_per_s: By the sum of computation and all communication, calibrated on the base row too.
    """

    row: Published
    base: Published
    utilization: float
    simulated_per_s: float
    linear_per_s: float
    summed_per_s: float

    @property
    def rates(self) -> tuple[float, float, float, float]:
        """Tokens per second and GPU: measured, simulated, by linear scaling, by the sum."""
        return self.row.tokens_per_s, self.simulated_per_s, self.linear_per_s, self.summed_per_s

    @property
    def errors(self) -> tuple[float, float, float]:
        """Relative errors of the simulator, of linear scaling and of the sum."""
        measured = self.row.tokens_per_s
        return self.simulated_per_s / measured - 1, self.linear_per_s / measured - 1, self.summed_per_s / measured - 1


@cache
def families() -> Mapping[str, Mapping[str, Any]]:
    """Return the families by name."""
    return dict(yaml.safe_load((HERE / "families.yaml").read_text(encoding="utf-8")))


@cache
def published() -> tuple[Published, ...]:
    """Return all rows."""
    lines = (HERE / "rows.csv").read_text(encoding="utf-8").splitlines()
    found = []
    for each in csv.DictReader(line for line in lines if not line.startswith("#")):
        tokens = int(each["batch_size"]) * int(each["micro_batches"]) * int(each["sequence"])
        number = float(each["published"])
        is_rate = families()[each["family"]].get("unit") != "seconds"
        found.append(
            Published(
                each["family"],
                each["model"],
                int(each["gpus"]),
                int(each["batch_size"]),
                int(each["micro_batches"]),
                int(each["sequence"]),
                each["sharding"],
                float(each["recompute"]),
                each["compiled"] == "yes",
                number if is_rate else tokens / number,
            )
        )
    return tuple(found)


def step_s(row: Published, utilization: float, measured_on: int = 0) -> float:
    """Return the mean simulated seconds of a step; for the arguments see `Published.scenario`."""
    scenario = row.scenario(utilization, measured_on)
    n_seeds = N_SEEDS if measured_on and measured_on < row.gpus else 1
    return float(measure(scenario, build(scenario, scenario.schedules[0]), n_seeds=n_seeds).step_s.mean())


def solved_utilization(row: Published) -> float:
    """Return the utilization with which the simulated step takes as long as the measured one.

    A step is a convex, piecewise linear function of the time of its computation, 1 / utilization: lines through the
    last two points meet the measured time after a few steps.

    Raises:
        ValueError: Communication alone takes longer.
    """
    slow = SLOWEST
    slow_s = step_s(row, 1 / slow)
    fast = max(slow * row.step_s / slow_s, FASTEST)
    for _ in range(50):
        fast_s = step_s(row, 1 / fast)
        if abs(fast_s / row.step_s - 1) < TOLERANCE:
            return 1 / fast
        slope = (slow_s - fast_s) / (slow - fast)
        following = fast + (row.step_s - fast_s) / slope if slope else 0.0
        if not FASTEST < following < SLOWEST:
            break
        slow = fast
        slow_s = fast_s
        fast = following
    raise ValueError(f"{row}: communication alone takes longer than the {row.step_s:.3f} s of a step")


def flops(row: Published) -> float:
    """Return the FLOPs of a step of a GPU."""
    return row.scenario(0.5).workload.training_flops * row.batch_size * row.micro_batches


def communication_s(row: Published) -> float:
    """Return the seconds of all gathers and reductions of a step at the rate of the slowest link."""
    scenario = row.scenario(0.5)
    cluster = scenario.cluster
    n_params = sum(scenario.workload.tensor_counts)
    fabric_Bps = LinkCost.of(cluster.fabric, n_parallel=1).capacity_Bps
    network_Bps = LinkCost.of(cluster.network, n_parallel=cluster.topology.nics_per_node).capacity_Bps
    slowest_Bps = min(fabric_Bps, network_Bps) if cluster.nodes > 1 else fabric_Bps
    if row.sharding in SHARING:  # an all-reduce once a step, and the broadcasts
        reduced_s = 2 * 2 * n_params * (row.gpus - 1) / row.gpus / slowest_Bps
        return reduced_s + 2 * n_params / (fabric_Bps if row.sharding == "zero1-node" else slowest_Bps)
    n_gathers = 1 if row.sharding == "grad" else 2
    reduced = 4 if families()[row.family]["schedule"].get("reduce_dtype") == "float32" else 2
    nbytes = n_params * (2 * n_gathers + reduced) * row.micro_batches
    if row.sharding != "hybrid":
        return nbytes * (row.gpus - 1) / row.gpus / slowest_Bps
    shared = (row.gpus_per_node - 1) / row.gpus_per_node
    n_copies = cluster.nodes
    return nbytes * shared / fabric_Bps + 2 * (n_copies - 1) / n_copies * reduced * n_params / network_Bps


def summed_per_s(row: Published, base: Published) -> float:
    """Return the rate if nothing overlaps, in the base row as in this one."""
    base_s = base.step_s - communication_s(base)
    if base_s <= 0:
        return math.nan
    return row.tokens / (base_s * flops(row) / flops(base) + communication_s(row))


def base_of(rows: Sequence[Published]) -> Published:
    """Return the row to calibrate on: of the fewest GPUs, and then the one that computes most."""
    name = families()[rows[0].family].get("calibrated_on")
    candidates = [row for row in rows if row.model == name] if name else rows
    return min(candidates, key=lambda row: (row.gpus, -row.tokens))


def predictions(family: str, *, network: str = "") -> Iterator[Prediction]:
    """Yield every row of a family with what is predicted for it, the calibrated ones too.

    Args:
        family: Its name.
        network: Bandwidth of a card, instead of the family's.
    """
    by_series: dict[tuple[str, str, bool, tuple[int, int]], list[Published]] = {}
    for row in published():
        if row.family == family:
            by_series.setdefault(row.series, []).append(replace(row, network=network))
    for rows in by_series.values():
        base = base_of(rows)
        utilization = solved_utilization(base)
        for row in rows:
            yield Prediction(
                row,
                base,
                utilization,
                row.tokens / step_s(row, utilization, base.gpus),
                base.tokens_per_s * flops(base) / base.tokens * row.tokens / flops(row),
                summed_per_s(row, base),
            )


def is_alike(each: Prediction) -> bool:
    """Tell whether a pass has about the tokens of the calibrated one, and repeats as much of the forward pass."""
    ratio = each.row.batch_size * each.row.sequence / (each.base.batch_size * each.base.sequence)
    return 0.5 < ratio < 2 and each.row.recompute == each.base.recompute
