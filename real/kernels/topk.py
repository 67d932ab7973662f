"""Top-k: the k entries of a vector with the largest magnitudes, found by one of three methods.

`exact` misses none. `mstopk` (Shi et al.) bisects a threshold between the mean and the maximum. It needs little
more than one read of the vector, as described below. `dgc` (Lin et al.) takes a threshold from a small sample. The
paper aims at k entries and lets the number of selected entries vary. Here the threshold aims at 2k entries, and the
largest k of these are taken. So the largest k are found unless the sample was far off.

**Short vectors on a GPU.** `torch.topk` is faster than the kernels of this package for vectors below `KERNELS_FROM`, or
what was measured of a GPU. It then serves all three methods: it also finds the largest k.

**No waiting.** On a GPU, no data is copied to the host for decisions. So the host runs ahead of a selection as of any
other kernel.

**Not finite.** NaN and infinities count as the largest. They are selected first and reach the parameters of all ranks,
as in dense training, and the loss shows it. Refusing them would make the host wait. Ordering them last would hide a
diverged run. If an entry is infinite, mstopk chooses the finite rest of the k almost arbitrarily, because its steps are
too wide.

**MSTopK.** Bisect a threshold, take the entries that reach it, and fill up with a stretch of entries that nearly reach
it. The threshold of the paper is mean + ratio (max - mean), and N bisections move the ratio through [0, 1]. The ratio
of an entry is its *height*, here in units of 2^-N. So the thresholds that N bisections can try are the whole numbers
below 2^N. The range between two of them is a *level*. N bisections find the level of the k-th largest entry: fewer than
k entries are on higher levels, and at least k on it or higher. All entries on higher levels are taken. The rest is a
contiguous stretch of the entries on that level, beginning at a random place.

**The paper's gaps.** Its thresholds lie in [mean, max]. So it cannot bracket more entries than reach the mean (42 % of
a normal distribution). Here levels continue below, with 2^N levels from the mean down to 0. The first bracket contains
the k-th largest of any vector. So constant vectors, many ties and a threshold that is never met need no special case.

**Several bisections at once.** The levels are numbers with N + 1 binary digits. A bisection finds one digit of the
level of the k-th largest. Counting the entries by their next b digits tries 2^b thresholds in one read, with exactly
the result of b bisections.

**Few reads.** Cut the vector into groups. If k groups have a maximum that reaches t, then k entries reach t. So the
k-th largest is among the entries that reach t. These are a few more than k if the groups are small compared with 1 /
density. The read that yields mean and maximum also finds the maxima of groups. Only groups with a maximum that reaches
t, or the lower edge of the level of t, are read again. All digits are then counted on the entries that reach that edge.
`by_groups`, on a CPU, and `real.kernels.triton_mstopk` do this, and select the same entries. If each magnitude is a
level of its own, the selection is exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from real.kernels import thresholds
from simdist.errors import RunError
from simdist.plan.ops import SelectMethod


@dataclass(frozen=True, slots=True)
class Scale:
    """Thresholds at equal distances: 2^N from the mean to the maximum, 2^N from 0 to the mean. All of shape `[]`.

    Args:
        mean: Mean of the magnitudes.
        up: Thresholds per unit of magnitude above the mean.
        down: Thresholds per unit of magnitude below the mean.
        n_bisections: N.
    """

    mean: Tensor
    up: Tensor
    down: Tensor
    n_bisections: int

    @classmethod
    def of(cls, mean: Tensor, highest: Tensor, n_bisections: int) -> "Scale":
        """Return the scale of magnitudes with this mean and maximum, in the dtype of the maximum.

        If the distance between two thresholds would be too small a number, as for equal magnitudes, it is a little
        larger.
        """
        mean = torch.minimum(mean.to(highest.dtype), highest)  # the mean of equal numbers may be rounded up
        densest = torch.finfo(highest.dtype).max
        up, down = ((2**n_bisections / distance).clamp(max=densest) for distance in (highest - mean, mean))
        return cls(mean, up, down, n_bisections)


def heights(magnitudes: Tensor, scale: Scale) -> Tensor:
    """Return the last threshold that each magnitude reaches, whole numbers from -2^N to 2^N - 1; 0 is the mean.

    Args:
        magnitudes: Finite, of the scale's dtype.
        scale: Scale of their vector.
    """
    offset = magnitudes - scale.mean
    exact = torch.where(offset >= 0, scale.up, scale.down).mul_(offset)
    return exact.floor_().clamp_(-(2**scale.n_bisections), 2**scale.n_bisections - 1)


N_BISECTIONS = 20  # recall of at least 0.9999 at densities of 0.001 and 0.01


def by_groups(values: Tensor, k: int, drawn: float, *, n_bisections: int) -> Tensor:
    """Return k positions, the same as those of N bisections that each read the vector.

    Args:
        values: Floating point `[count]` on the CPU.
        k: More than 0 and less than `count`.
        drawn: Where the stretch begins, from 0 to 1.
        n_bisections: Number of binary digits of a height that are distinguished, besides the sign. From 1 to 23: a
            float32 has 24. At 10, 15, 20 the recall of a normal distribution is 0.96, 0.999 and 0.9999.

    Returns:
        int64 `[k]`, all different, in no particular order.

    Source: Shi et al., MLSys 2021, arXiv 2010.10458, algorithm 1.
    """
    groups = thresholds.maxima_of_groups(values, k)
    mean = torch.tensor(groups.total / values.numel(), dtype=torch.float64)
    scale = Scale.of(mean, groups.maxima.max(), n_bisections)
    positions, magnitudes = _candidates(groups, k, scale, drawn)
    keys = heights(magnitudes, scale).int().add_(2**n_bisections)
    kth = _kth_largest(keys, k, n_bisections + 1)
    certain = positions[keys > kth]
    possible = positions[keys == kth]
    n_missing = k - certain.numel()
    first = int(drawn * (possible.numel() - n_missing + 1))
    return torch.cat([certain, possible[first : first + n_missing]])


def _candidates(groups: thresholds.GroupMaxima, k: int, scale: Scale, drawn: float) -> tuple[Tensor, Tensor]:
    """Return positions and magnitudes of at least k, rarely many more: all at or above the level of the lowest."""
    if 2 * k <= groups.maxima.numel():
        return thresholds.reaching(groups, foot(thresholds.reached_by(groups.maxima, k), scale))
    aim = min(groups.values.numel(), k + k // 4)
    threshold = thresholds.sampled_threshold(groups.values, aim, torch.tensor(drawn, dtype=torch.float64))
    positions, magnitudes = thresholds.reaching(groups, foot(threshold.item(), scale))
    return (positions, magnitudes) if positions.numel() >= k else thresholds.reaching(groups, 0.0)


def foot(magnitude: float, scale: Scale) -> float:
    """Return a number, at most that magnitude, that all entries on its level or above reach.

    It is slightly below the threshold of the level, because heights are rounded twice, by 2^-24 of their value each
    time.

    Args:
        magnitude: From 0 to the maximum.
        scale: Scale of the levels.
    """
    height = heights(torch.tensor(magnitude, dtype=scale.mean.dtype), scale).item()
    offset = height / (scale.up if height >= 0 else scale.down).item()
    return min(magnitude, scale.mean.item() + offset - abs(offset) * 2**-20)


def _kth_largest(keys: Tensor, k: int, n_digits: int) -> int:
    """Return the k-th largest of integers below 2^n_digits: first its upper binary digits, then its lower ones."""
    n_lower = n_digits // 2
    upper, n_above = thresholds.kth_cell(keys >> n_lower, k)
    lower, _ = thresholds.kth_cell(keys[keys >> n_lower == upper] & (2**n_lower - 1), k - n_above)
    return (upper << n_lower) + lower


#: Elements from which the kernels for GPUs are faster than `torch.topk` of magnitudes. Source: experiments/gpu/results,
#: H200, torch 2.11, triton 3.6, launched one by one: 2^24 elements take 0.9 to 3 times as long, 2^26 at most 0.6.
#: Torch 2.7 and 2.8 have a slower `torch.topk` (github.com/pytorch/pytorch/pull/164459).
KERNELS_FROM = 2**25

_MAX_COUNT = 2**31 - 1  # indices are int32
_MAX_CANDIDATES = 4  # times k: for shorter vectors, finding the largest k directly is as fast

# How entries are found: all or none are taken; by torch; on a CPU, by groups; on a GPU, by kernels of this package.
Way: TypeAlias = Literal["trivial", "torch.topk", "groups", "kernels"]

# Draws a number from [0, 1), float64 `[]`, on the device of the vector.
DrawNumber: TypeAlias = Callable[[], Tensor]


@final
@dataclass(frozen=True, slots=True)
class TopK:
    """The size of a selection, and where it runs. These determine how it is done, and its memory.

    Args:
        count: Elements of the vector.
        k: Entries to select.
        method: See `select_largest`.
        dtype: Type of the vector.
        device: Where the vector is.
        kernels_from: Elements from which the kernels for GPUs are faster than `torch.topk`.
    """

    count: int
    k: int
    method: SelectMethod
    dtype: torch.dtype
    device: torch.device
    kernels_from: int = KERNELS_FROM

    @property
    def way(self) -> Way:
        """How entries are found."""
        if self.k in (0, self.count):
            return "trivial"
        few = _MAX_CANDIDATES * self.k < self.count or self.method == "mstopk"
        if self.device.type == "cpu":
            return "groups" if few and self.method != "exact" else "torch.topk"
        is_long = self.count >= self.kernels_from
        return "kernels" if few and is_long and thresholds.can_use_triton(self.device, self.dtype) else "torch.topk"

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of temporary tensors, besides those of the size of the result."""
        match self.way:
            case "kernels":
                from real.kernels import triton_candidates

                return triton_candidates.candidates_nbytes(self.count, self.k)
            case "torch.topk":
                return self.count * self.dtype.itemsize  # magnitudes
            case "groups":
                return thresholds.groups_nbytes(self.count, self.dtype)
            case "trivial":
                return 0


def select_largest(
    values: Tensor,
    k: int,
    method: SelectMethod,
    *,
    generator: torch.Generator | None = None,
    kernels_from: int = KERNELS_FROM,
) -> tuple[Tensor, Tensor]:
    """Return k entries of largest magnitude, and their positions.

    >>> select_largest(torch.tensor([1.0, -5.0, 0.5, 3.0]), 2, "mstopk")
    (tensor([-5.,  3.]), tensor([1, 3], dtype=torch.int32))

    Args:
        values: Floating point `[count]`, on any device.
        k: From 0 to `count`.
        method: `exact`, or a method that misses a few of the largest and takes slightly smaller ones instead.
        generator: Chooses among nearly equal ones; torch's default generator of the CPU if absent. `exact` needs none.
        kernels_from: See `TopK`.

    Returns:
        Values `[k]`, unchanged, signed and of the same dtype; int32 indices `[k]`, all different, in no particular
        order.

    Raises:
        RunError: k or the shape is invalid.

    Source: Shi et al., MLSys 2021, arXiv 2010.10458, algorithm 1 (mstopk); Lin et al., ICLR 2018, arXiv 1712.01887,
    section 3.1 (dgc).
    """
    return select_drawn(
        values, k, method, lambda: thresholds.uniform(generator, values.device), kernels_from=kernels_from
    )


def select_drawn(
    values: Tensor,
    k: int,
    method: SelectMethod,
    draw: DrawNumber,
    *,
    added: Tensor | None = None,
    kernels_from: int = KERNELS_FROM,
) -> tuple[Tensor, Tensor]:
    """Select like `select_largest`, which has the other arguments.

    Args:
        values: Floating point `[count]`.
        k: From 0 to `count`.
        method: The method.
        draw: Called at most once.
        added: Added to `values` in place first; `values` is then contiguous.
        kernels_from: See `TopK`.
    """
    _check(values, k)
    values = values.detach()
    way = TopK(values.numel(), k, method, values.dtype, values.device, kernels_from).way
    if added is not None and (way != "kernels" or method == "dgc"):  # whose sample is of the sum
        values.add_(added)
        added = None
    match way:
        case "trivial":
            indices = torch.arange(k, device=values.device)
        case "torch.topk":
            indices = _by_torch(values, k)
        case "groups":
            indices = _on_cpu(values, k, method, draw())
        case "kernels":
            indices = _by_kernels(values, k, method, draw, added)
    return values.index_select(0, indices), indices.to(torch.int32)


def densify(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """Write the sum of sparse vectors into a dense one.

    >>> out = torch.empty(4)
    >>> densify(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 3, 3], dtype=torch.int32), out)
    >>> out
    tensor([1., 0., 0., 5.])

    Args:
        values: `[k]`, of the dtype of `out`.
        indices: int32 or int64 `[k]`; values with equal indices are added up.
        out: `[count]`, overwritten.
    """
    out.zero_().index_add_(0, indices, values)


def _check(values: Tensor, k: int) -> None:
    if values.dim() != 1 or not values.is_floating_point():
        raise RunError(f"top-k of {values.dtype} {list(values.shape)}: must be a floating-point vector")
    if values.numel() > _MAX_COUNT:
        raise RunError(f"top-k of {values.numel()} elements: int32 indices reach {_MAX_COUNT}; select from shards")
    if not 0 <= k <= values.numel():
        raise RunError(f"top-k with k = {k} of {values.numel()} elements; must be from 0 to {values.numel()}")


def _by_torch(values: Tensor, k: int) -> Tensor:
    return torch.topk(values.abs(), k, sorted=False).indices


def _on_cpu(values: Tensor, k: int, method: SelectMethod, drawn: Tensor) -> Tensor:
    if method == "mstopk":
        return by_groups(values, k, drawn.item(), n_bisections=N_BISECTIONS)
    threshold = thresholds.sampled_threshold(values, 2 * k, drawn).item()
    candidates, magnitudes = thresholds.reaching(thresholds.maxima_of_groups(values, k), threshold)
    if candidates.numel() < k:
        return _by_torch(values, k)
    return candidates[torch.topk(magnitudes, k, sorted=False).indices]


def _by_kernels(values: Tensor, k: int, method: SelectMethod, draw: DrawNumber, added: Tensor | None) -> Tensor:
    from real.kernels import triton_dgc, triton_mstopk  # takes a second, and is only useful with a GPU

    if method == "dgc":
        drawn = draw()
        return triton_dgc.dgc(values, k, thresholds.sampled_threshold(values, 2 * k, drawn), drawn)
    if method == "mstopk":
        return triton_mstopk.mstopk(values, k, draw(), n_bisections=N_BISECTIONS, added=added)
    first = torch.zeros((), dtype=torch.float64, device=values.device)
    return triton_mstopk.mstopk(values, k, first, n_bisections=None, added=added)
