"""How much of a GPU's peak the training of a transformer reaches: from measured rates, or from a roofline.

The utilization of a measured rate is what the workload's FLOPs, with those that are computed again, take of the peak:

    utilization = tokens/s * FLOPs per token / peak

A rate contains the update, and of several GPUs communication that is not hidden. So this is a lower bound of what each
GPU computes at. `simdist.runs.measured_rates` takes both out. They are simulated, so the range of the utilization is
that of none to twice as much. A roofline counts FLOPs and the peak only, and is too fast.
NeuSight measured by how much: predictions of training times are 12 to 41 % too short on A100 and 26 to 47 % on H100, so
the models reach 59 to 88 % and 53 to 74 % of it. These were fp32; bf16 reaches less.

Source:
    simdist/scenario/presets/rates.csv (rates); Lee et al., Forecasting GPU Performance for Deep Learning Training and
    Inference, ASPLOS 2025, arXiv 2407.13853, files scripts/asplos/label (rooflines).
"""

import csv
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

from simdist.scenario import Workload, presets
from simdist.scenario.cluster import Device
from simdist.settings.base import plural
from simdist.settings.precision import Precision

_ROOFLINE_SINCE_HOPPER = (0.53, 0.74)  # 1 - mean errors of NeuSight's rooflines: 47 and 26 % on H100
_ROOFLINE_BEFORE = (0.59, 0.88)  # 41 and 12 % on A100
_ROOFLINE_ELSEWHERE = (0.53, 0.88)  # of GPUs whose compute capability is not stated
_HOPPER = 9.0  # compute capability
_FEWEST_RATES = 3  # whose range is one of models in general
_SAME_SHARE = 0.01  # rates state what is computed again in percent


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured rate of training.

    Args:
        model: Name of the workload preset.
        device: GPU, a word of a device's name.
        precision: Precision of the arithmetic.
        is_compiled: With torch.compile.
        recompute: Share of the blocks' forward pass that the backward pass computes again.
        batch_size: Sequences per GPU and pass.
        sequence: Tokens of a sequence.
        n_ranks: GPUs that reached it together.
        tokens_per_s: Of each GPU.
        source: Where the rate is from.
    """

    model: str
    device: str
    precision: str
    is_compiled: bool
    recompute: float
    batch_size: int
    sequence: int
    n_ranks: int
    tokens_per_s: float
    source: str

    @property
    def step_s(self) -> float:
        """Seconds of a step of one pass."""
        return self.batch_size * self.sequence / self.tokens_per_s

    def utilization(self, peak_flops: float) -> float:
        """Return the share of a peak that the rate reaches, communication that is not hidden included."""
        return self.tokens_per_s * self.workload().training_flops / self.sequence / peak_flops

    def workload(self) -> Workload:
        """Return the workload whose rate it is."""
        return _workload(self)

    def described(self) -> str:
        """Return what was measured, for people."""
        compiled = ", compiled" if self.is_compiled else ""
        return (
            f"{self.model} on {self.n_ranks} {self.device}{compiled}, {self.tokens_per_s:,.0f} tokens/s ({self.source})"
        )


@functools.cache
def _workload(rate: Rate) -> Workload:
    changed = {"transformer": {"sequence": rate.sequence}, "batch_size": rate.batch_size, "recompute": rate.recompute}
    return Workload.model_validate(presets.expand("workload", {"preset": rate.model, **changed}))


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated utilization.

    Args:
        share: Share of the peak.
        source: Where the share is from.
        low: Lower end of its range; `share` if this job was measured.
        high: Upper end.
        range_source: Where the ends are from.
        n_ranks: GPUs whose rate tells the share.
    """

    share: float
    source: str
    low: float
    high: float
    range_source: str
    n_ranks: int = 1


@functools.cache
def measured_rates() -> tuple[Rate, ...]:
    """Return all measured rates."""
    text = resources.files("simdist.scenario").joinpath("presets", "rates.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return tuple(_rate(row) for row in rows)


def _rate(row: dict[str, str]) -> Rate:
    return Rate(
        model=row["model"],
        device=row["device"],
        precision=row["precision"],
        is_compiled=row["compiled"] == "yes",
        recompute=float(row["recompute"]),
        batch_size=int(row["batch_size"]),
        sequence=int(row["sequence"]),
        n_ranks=int(row["ranks"]),
        tokens_per_s=float(row["tokens_per_s"]),
        source=row["source"],
    )


def estimate(
    workload: Workload,
    device: Device,
    precision: Precision,
    *,
    is_compiled: bool,
    share_of: Callable[[Rate], float] | None = None,
) -> Estimate | None:
    """Estimate the utilization of a transformer; None if the device states no peak of this precision.

    The share is that of the measured model on this GPU generation that is nearest in parameters, then in FLOPs. The
    range spans all measured models, and the error of rooflines if these are few. For a model that was measured with
    this sequence and checkpointing, it is that of the communication in the rate. Without any rate, the share is that
    of a roofline with its error.

    Args:
        workload: The model and its sequence.
        device: The GPU.
        precision: Precision of the arithmetic.
        is_compiled: With torch.compile.
        share_of: Returns the share of the peak that one GPU reaches while it computes, by a rate. If absent, the share
            that the rate reaches.
    """
    peak = device.peak_flops.at(precision)
    if peak is None:
        return None
    rates = _of_device(device, precision)
    alike = [each for each in rates if each.is_compiled == is_compiled] or rates
    if not alike:
        return _roofline(device)
    nearest = min(alike, key=lambda each: _distance(each, workload))
    of_rate = share_of or (lambda rate: rate.utilization(peak))
    shares = [of_rate(each) for each in alike]
    share = shares[alike.index(nearest)]
    only = "compiled" if nearest.is_compiled else "not compiled"
    other = "" if nearest.is_compiled == is_compiled else f"; all that were measured are {only}"
    source = f"measured: {nearest.described()}{other}"
    reached = nearest.utilization(peak)
    ends = (reached, 2 * share - reached)
    if not other and _is_same(nearest, workload):
        added = "the update" if nearest.n_ranks == 1 else f"communication of the {nearest.n_ranks} GPUs"
        hidden = f"{added}: from none to twice what is simulated"
        return Estimate(share, source, *ends, hidden, nearest.n_ranks)
    span = f"{len(alike)} {plural(len(alike), 'rate')} on {nearest.device}"
    if len(alike) < _FEWEST_RATES:
        bounds = _roofline(device)
        shares += [bounds.low, bounds.high]
        span = f"{span}, and {bounds.range_source}"
    return Estimate(share, source, min(*shares, *ends), max(*shares, *ends), span, nearest.n_ranks)


def _of_device(device: Device, precision: Precision) -> list[Rate]:
    words = set(re.split(r"[^A-Za-z0-9]+", device.name))  # of names such as NVIDIA A100-SXM4-80GB
    return [each for each in measured_rates() if each.device in words and each.precision == precision]


def _distance(rate: Rate, workload: Workload) -> tuple[float, float]:
    """Return how far a measured model is: in parameters, and in FLOPs per sample, which grow with the sequence."""
    theirs = rate.workload()
    by_size = abs(math.log(sum(theirs.tensor_counts) / sum(workload.tensor_counts)))
    by_flops = abs(math.log(theirs.flops / workload.flops)) if workload.flops else 0.0
    return round(by_size, 3), by_flops


def _is_same(rate: Rate, workload: Workload) -> bool:
    """Tell whether it is the rate of a workload with these FLOPs, of which as many are computed again."""
    theirs = rate.workload()
    is_same_model = theirs.tensor_counts == workload.tensor_counts and theirs.flops == workload.flops
    return is_same_model and abs(theirs.recompute - workload.recompute) < _SAME_SHARE


def _roofline(device: Device) -> Estimate:
    low, high = _ROOFLINE_ELSEWHERE
    if device.compute_capability is not None:
        low, high = _ROOFLINE_SINCE_HOPPER if device.compute_capability >= _HOPPER else _ROOFLINE_BEFORE
    name = device.name or "this GPU"
    source = f"roofline: training reaches {low:.0%} to {high:.0%} of the peak; no rate was measured on {name}"
    return Estimate((low + high) / 2, source, low, high, "the error of rooflines (NeuSight)")


def rounded(share: float) -> str:
    """Return a share for a file, such as 45.6%. A rounding error of it is one of the step time."""
    return f"{100 * share:.4g}%"
