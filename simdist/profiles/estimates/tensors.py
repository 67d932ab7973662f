"""The model as schedules need it: tensors with their backward seconds, and their division into gradient buckets.

If the traces show the sizes of parameters, the tensors are the real ones. Otherwise one tensor stands for each bucket.
In both cases the schedule `sync` must produce the observed buckets. It does so with the default bucket sizes, with
sizes derived from the observed buckets, or with one tensor per bucket.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from simdist.errors import ScenarioError, TraceError
from simdist.plan.plan import ITEM_NBYTES, DType
from simdist.profiles.estimates.base import BaseTimes
from simdist.profiles.job.job import TracedJob
from simdist.profiles.kineto.columns import Floats
from simdist.scenario import Tensor
from simdist.schedules import Job, Sync
from simdist.schedules.parts import BUCKET_NBYTES, FIRST_BUCKET_NBYTES, gradient_buckets

_ONE_TENSOR = 1  # a bucket is full with its first tensor


@dataclass(frozen=True, slots=True)
class Model:
    """Tensors, and how gradients are bucketed.

    Args:
        tensors: In forward order, with backward seconds.
        dtype: Data type of the gradients.
        first_bucket_nbytes: The argument of the schedule `sync`.
        bucket_nbytes: The argument of the schedule `sync`.
        is_real: These are the model's own tensors, not one per bucket.
        notes: Assumptions.
    """

    tensors: tuple[Tensor, ...]
    dtype: DType
    first_bucket_nbytes: int
    bucket_nbytes: int
    is_real: bool
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(tensor.count for tensor in self.tensors) * ITEM_NBYTES[self.dtype]

    @property
    def schedule(self) -> Sync:
        """Synchronous SGD with the observed buckets."""
        if (self.first_bucket_nbytes, self.bucket_nbytes) == (FIRST_BUCKET_NBYTES, BUCKET_NBYTES):
            return Sync()
        return Sync(first_bucket_nbytes=self.first_bucket_nbytes, bucket_nbytes=self.bucket_nbytes)


def find_model(job: TracedJob, base: BaseTimes, given: Sequence[Tensor] = ()) -> Model:
    """Return the model of the traced job.

    Args:
        job: The job.
        base: Undisturbed times.
        given: The user's tensors in forward order. They replace those of the traces.

    Raises:
        TraceError: No trace shows the size of the model.
        ScenarioError: The given tensors do not match the traces.
    """
    dtype, notes = _dtype(job)
    item = ITEM_NBYTES[dtype]
    sizes = [nbytes for nbytes in base.buckets_nbytes if nbytes is not None]
    is_known = len(sizes) == len(base.buckets_nbytes) > 0
    named = list(given) or _of_traces(job)
    if named:
        tensors, more = _real(named, [nbytes // item for nbytes in sizes] if is_known else [], base, bool(given))
        notes += more
        if tensors:
            usual_nbytes = min(sizes[1:-1] or sizes[1:] or [1])  # the last may be smaller
            choices = [(size, nbytes) for size in sizes[:1] for nbytes in (BUCKET_NBYTES, usual_nbytes)]
            if limits := _limits(tensors, sizes, dtype, choices):
                return Model(tuple(tensors), dtype, *limits, is_real=True, notes=tuple(notes))
            notes.append("no sizes of buckets give the buckets that were seen: one tensor stands for each of them")
    if not is_known:
        raise TraceError(
            "the traces tell neither sizes of gradients nor of parameters: trace with record_shapes=True, or give "
            "--tensors FILE|PRESET"
        )
    if not named:
        notes.append(
            f"sizes of parameters are not in the traces (record_shapes=True tells them): one tensor stands for each of "
            f"the {len(sizes)} gradient buckets"
        )
    counts = [max(1, nbytes // item) for nbytes in sizes]
    ready = [Tensor(name=f"bucket.{number}", count=count) for number, count in enumerate(counts)]
    tensors = _timed(ready, np.array(base.buckets_s))
    limits = _limits(tensors, sizes, dtype, []) or (_ONE_TENSOR, _ONE_TENSOR)
    return Model(tuple(tensors), dtype, *limits, is_real=False, notes=tuple(notes))


def _dtype(job: TracedJob) -> tuple[DType, list[str]]:
    stated = next((each.dtype for each in job.profiles if each.dtype), "")
    match stated:
        case "float32" | "float16" | "bfloat16":
            return stated, []
        case "":
            return "float32", ["the traces do not tell the type of gradients: taken for float32"]
        case _:
            return "float32", [f"gradients are {stated}, which scenarios do not have: taken for float32"]


def _of_traces(job: TracedJob) -> list[Tensor]:
    """Return the parameters in forward order; gradients become ready from the last to the first."""
    lists = [each.gradients for each in job.profiles if each.gradients]
    if not lists:
        return []
    counts = [[gradient.count for gradient in each] for each in lists]
    alike = [each for each, own in zip(lists, counts, strict=True) if own == counts[0]]
    seconds = np.median([[gradient.backward_s for gradient in each] for each in alike], axis=0)
    forward = zip(counts[0][::-1], seconds[::-1].tolist(), strict=True)
    return [
        Tensor(name=f"tensor.{number}", count=count, backward_s=max(0.0, backward_s))
        for number, (count, backward_s) in enumerate(forward)
    ]


def _real(
    tensors: Sequence[Tensor], buckets: Sequence[int], base: BaseTimes, is_given: bool
) -> tuple[list[Tensor], list[str]]:
    """Return the tensors with backward seconds that add up to the time of each bucket; None if they do not fit."""
    total = sum(tensor.count for tensor in tensors)
    seen = sum(buckets)
    if buckets and total != seen:
        if is_given:
            raise ScenarioError(
                f"--tensors: has {total} elements in {len(tensors)} tensors; the gradients of the traces have {seen}: "
                f"give the model that was trained, or leave it out"
            )
        note = f"parameters of {total} elements do not add up to the gradient buckets of {seen}: they are not used"
        return [], [note]
    ready = list(tensors)[::-1]
    weights = _weights(ready)
    if not buckets:
        return _timed(ready, math.fsum(base.buckets_s) * weights / weights.sum()), []
    elements = np.cumsum([0, *(tensor.count for tensor in ready)])
    borders = np.cumsum([0, *buckets])
    if set(borders.tolist()) <= set(elements.tolist()):
        return _timed(ready, _in_buckets(weights, np.searchsorted(elements, borders).tolist(), base.buckets_s)), []
    done_s = np.interp(elements, borders, np.cumsum([0.0, *base.buckets_s]))
    note = "tensors become ready in another order than they stand: backward seconds are shared by elements"
    return _timed(ready, np.diff(done_s)), [note]


def _weights(ready: Sequence[Tensor]) -> Floats:
    """Return the shares of the backward pass: as measured, else by FLOPs, else by elements."""
    choices: Floats = np.array([(tensor.backward_s or 0.0, tensor.flops, tensor.count) for tensor in ready]).T
    return next(weights for weights in choices if weights.any())


def _in_buckets(weights: Floats, borders: Sequence[int], buckets_s: Sequence[float]) -> Floats:
    """Return seconds of tensors that add up to those of their bucket, divided by weights, else evenly."""
    seconds = np.zeros_like(weights)
    for (first, stop), bucket_s in zip(pairwise(borders), buckets_s, strict=True):
        part = weights[first:stop]
        share = part / part.sum() if part.sum() > 0 else np.full(stop - first, 1 / max(1, stop - first))
        seconds[first:stop] = share * bucket_s
    return seconds


def _timed(ready: Sequence[Tensor], seconds: Floats) -> list[Tensor]:
    """Return the tensors in forward order with these backward seconds, to the nanosecond."""
    rounded = np.diff(np.round(np.cumsum([0.0, *seconds]), 9))  # rounded so that sums are preserved
    times = [round(max(0.0, float(each)), 9) for each in rounded]
    timed = [tensor.model_copy(update={"backward_s": each}) for tensor, each in zip(ready, times, strict=True)]
    return timed[::-1]


def _limits(
    tensors: Sequence[Tensor], sizes: Sequence[int], dtype: DType, choices: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """Return sizes of the first and the other buckets that produce the observed ones; the defaults if those do."""
    counts = tuple(tensor.count for tensor in tensors)
    before = list(accumulate(counts, initial=0))
    job = Job(1, 1, 1, tensor_counts=counts, dtype=dtype)
    for first_nbytes, nbytes in ((FIRST_BUCKET_NBYTES, BUCKET_NBYTES), *choices):
        found = gradient_buckets(job, first_nbytes=first_nbytes, nbytes=nbytes)
        given = [(before[stop] - before[start]) * ITEM_NBYTES[dtype] for start, stop in found]
        if not sizes or given == list(sizes):
            return first_nbytes, nbytes
    return None
