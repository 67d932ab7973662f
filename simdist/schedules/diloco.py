"""DiLoCo: every worker trains on its own. Periodically an outer optimizer treats their mean progress as a gradient."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Annotated, ClassVar, Literal, Self, final

from pydantic import BeforeValidator, Field, model_validator

from simdist.plan import Body, Buffer, Group, Result, ops
from simdist.plan.plan import ITEM_NBYTES, DType
from simdist.schedules import parts
from simdist.schedules.averaging import AVERAGING_TRAITS, AveragingSchedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import REQUIRED, LabelForm, piece, written
from simdist.schedules.tuning import (
    FP16,
    OUTER_OPTIMIZER,
    OVERLAP,
    Allowance,
    Axis,
    ChangedSettings,
    Levels,
    Permit,
)
from simdist.settings.units import Fraction, Whole, parse_whole_or

_FRAGMENTS = (1, 2, 4)  # numbers of fragments that `tune` tries
_WIRE: dict[str, DType] = {"fp16": "float16", "bf16": "bfloat16"}


@final
class DiLoCo(AveragingSchedule):
    """Train locally. Every `period` steps the outer optimizer updates *anchors*, from which all ranks continue.

        outer gradient = mean over workers of (anchor - parameters)
        anchor         = outer optimizer(anchor, outer gradient), SGD with Nesterov momentum
        parameters     = mixing parameters + (1 - mixing) anchor

    With `fragments`, the model is synchronised in parts, each every `period` steps, in turn. With `overlap_steps`, the
    anchors are updated this many steps after the outer gradient was sent. Both together are Streaming DiLoCo.

    Source:
        Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105; Douillard
        et al., Streaming DiLoCo with Overlapping Communication, arXiv 2501.18512; torchft `local_sgd.DiLoCo`.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {"period": 1},
        {"period": 4, "ranks_per_worker": "node", "warmup_steps": 3},
        {"period": 3, "compression": "fp16"},
        {"period": 4, "fragments": 2, "overlap_steps": 1, "mixing": 0.5, "synchronize": False},
        {"period": 6, "fragments": 2, "layers": 4, "overlap_steps": 4, "phase": 1},
        {"period": 3, "overlap_steps": 3, "ranks_per_worker": 4, "mixing": 0.25},
    )

    place: ClassVar[int] = 50
    permit: ClassVar[Permit | None] = OUTER_OPTIMIZER
    permits: ClassVar[tuple[Permit, ...]] = (FP16, OVERLAP)
    takes_levels: ClassVar[bool] = True

    label_form: ClassVar[LabelForm] = (
        "diloco",
        (
            piece("period", before="-", default=REQUIRED),
            piece("ranks_per_worker", [("node", "-workernode")], before="-worker", default=1),
            piece("fragments", before="-fragments", default=1),
            piece("layers", before="-layers", default=1),
            *AVERAGING_TRAITS,
            piece("mixing", before="-mix", default=0),
            piece("compression", [("fp16", "-fp16"), ("bf16", "-bf16")]),
        ),
    )
    kind: Literal["diloco"] = "diloco"
    period: Whole = Field(ge=1)
    """Steps from one update of an anchor to the next."""
    ranks_per_worker: Annotated[int | Literal["node"], BeforeValidator(parse_whole_or("node"))] = 1
    """Consecutive ranks that average their gradients in every step, so that they train as one worker."""
    fragments: Whole = Field(default=1, ge=1)
    """Parts of the model that are synchronised in turn."""
    layers: Whole | None = Field(default=None, ge=1)
    """Cut the model into this many stretches of about equal size and deal them to the fragments in turn (strided). If
    absent, every fragment is one stretch (sequential)."""
    mixing: Fraction = Field(default=0.0, lt=1)
    """Share of its own parameters that a rank keeps when it takes over the anchors."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """Type in which outer gradients are sent."""

    @model_validator(mode="after")
    def _takes_turns(self) -> Self:
        if self.period < self.fragments:
            raise ValueError(
                f"period {self.period} with {self.fragments} fragments; each has a step of its own once a period: "
                f"write at most {self.period} fragments"
            )
        if self.layers is not None and self.layers < self.fragments:
            raise ValueError(f"{self.layers} layers for {self.fragments} fragments; write at least {self.fragments}")
        return self

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return also half precision for the outer gradients, and the numbers of fragments."""
        fragments = [each for each in _FRAGMENTS if each <= len(job.tensor_counts)]
        wire = [cls.axis("compression", ("none", "fp16"), FP16)] if job.dtype == "float32" else []
        return (*wire, *super().axes(job, allowed), cls.axis("fragments", fragments))

    @classmethod
    def settings_of(cls, levels: Levels, changed: ChangedSettings) -> dict[str, object] | None:
        """Return the settings that average over all ranks, which are one level."""
        return {"period": levels[0][0]} | dict(changed) if len(levels) == 1 else None

    def default_label(self) -> str:
        """Return the label, such as `diloco-100` or `diloco-100-worker8-fragments4-overlap5`."""
        return written(self, self.label_form)

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what is wrong on this cluster: workers that do not divide the ranks."""
        found = super().problems(shape)
        size = self.ranks_per_worker
        if isinstance(size, int) and (size < 1 or shape.world_size % size):
            legal = ", ".join(str(n) for n in range(1, shape.world_size + 1) if shape.world_size % n == 0)
            problem = f"{size} ranks do not divide the {shape.world_size} ranks of the world; sizes that do: {legal}"
            found.append(("ranks_per_worker", problem))
        return found

    def unused_in(self, job: Job) -> list[str]:
        """Return a sentence if there is only one worker, or if the model has fewer stretches than asked for."""
        wanted = self.layers or self.fragments
        n_pieces = len(self._stretches(job))
        what = f"{'layers' if self.layers else 'fragments'}: {wanted}, and {len(job.tensor_counts):,} tensors"
        found = [f"has {what}, which make {n_pieces:,}"] if n_pieces < wanted else []
        alone = self.local_gradients(job) == Group(job.world_size)
        return [*found, "has one worker, of all ranks: there is no other to average with"] if alone else found

    def shortest_period(self) -> int:
        """Return the period."""
        return self.period

    def local_gradients(self, job: Job) -> Group | None:
        """Return the ranks of a worker, if there are several."""
        size = job.ranks_per_node if self.ranks_per_worker == "node" else self.ranks_per_worker
        return Group(size) if size > 1 else None

    def average(self, step: int, shape: Shape) -> Group | None:
        """Return the world in steps where a fragment has its turn. In a job of few tensors some are empty."""
        has_turn = step >= self.warmup_steps and self._n_turns(step + 1) > max(self._n_turns(step), 0)
        if has_turn and isinstance(shape, Job) and not self._pieces(self.fragment(step), shape):
            return None
        return Group(shape.world_size) if has_turn else None

    def fragment(self, step: int) -> int:
        """Return the number of the fragment that has its turn, counted from the end of the warm-up."""
        return (self._n_turns(step + 1) - 1) % self.fragments

    def _n_turns(self, step: int) -> int:
        """Return the number of turns that end before a step.

        Turns end evenly, as far as steps allow, and the last one ends with a period. A phase shifts all turns. The
        first then ends at the first step of that phase, modulo the shortest turn.
        """
        turn = self.period // self.fragments
        moved = 0 if self.phase is None else turn - 1 - (self.phase - self.warmup_steps) % turn
        return (step - self.warmup_steps + moved) * self.fragments // self.period

    def cycle(self, job: Job) -> range:
        """Return the first period after the warm-up."""
        return self._repeated(self.period, job)

    def result(self, step: int, job: Job) -> Result:
        """Declare also the tensors that the outer optimizer updates. The end of the warm-up sets anchors."""
        result = super().result(step, job)
        taken = self._average(step - self.overlap_steps, job)
        if taken:
            tensors = tuple(self._pieces(taken[1], job).values()) if self.fragments > 1 else ()
            return replace(result, tensors=tensors, mixing=self.mixing)
        return replace(result, mixing=0.0) if step == self.warmup_steps - 1 else result

    def _parameters(self, job: Job) -> Mapping[str, parts.Bucket]:
        if job.has_param_buffers:
            return super()._parameters(job)
        stretches = self._stretches(job)
        if len(stretches) == 1:
            return {parts.PARAM: stretches[0]}
        return {f"{parts.PARAM}.{piece}": tensors for piece, tensors in enumerate(stretches)}

    def _stretches(self, job: Job) -> list[parts.Bucket]:
        """Cut the model into stretches of about equal size. Each ends at the tensor boundary nearest to its share."""
        n_pieces = self.layers or self.fragments
        ends = [*accumulate(job.tensor_counts, initial=0)]
        shares = (ends[-1] * piece / n_pieces for piece in range(n_pieces + 1))
        bounds = sorted({min(range(len(ends)), key=lambda end: abs(ends[end] - share)) for share in shares})
        return list(pairwise(bounds))

    def _pieces(self, fragment: int, job: Job) -> dict[str, parts.Bucket]:
        mine = self._stretches(job)[fragment :: self.fragments]
        found = super()._pieces(fragment, job)
        return {
            piece: (first, last)
            for piece, (first, last) in found.items()
            if any(begin <= first and last <= end for begin, end in mine)
        }

    def exchange_buffers(self, job: Job) -> tuple[Buffer, ...]:
        """Return the buffers of anchors and outer gradients."""
        wire = self._wire_dtype(job)
        buffers: list[Buffer] = []
        for name, tensors in self._parameters(job).items():
            each = name.removeprefix(parts.PARAM)
            buffers += [
                parts.tensor_buffer(job, f"anchor{each}", tensors, initialized=True),
                parts.tensor_buffer(job, f"outer{each}", tensors),
                *([parts.tensor_buffer(job, f"wire{each}", tensors, wire)] if wire else []),
            ]
        return tuple(buffers)

    def _wire_dtype(self, job: Job) -> DType | None:
        """Return the type that outer gradients are converted to; None without a conversion."""
        wire = _WIRE.get(self.compression)
        return wire if wire and ITEM_NBYTES[wire] < ITEM_NBYTES[job.dtype] else None

    def _send(self, group: Group, fragment: int, job: Job) -> Body:
        pieces = self._pieces(fragment, job)
        sent = {piece: f"{'wire' if self._wire_dtype(job) else 'outer'}{piece}" for piece in pieces}
        return (
            *(ops.Combine((f"anchor{each}", f"param{each}"), (1.0, -1.0), name) for each, name in sent.items()),
            *([ops.Wait(list(sent.values())[-1])] if self.synchronize else []),
            *(ops.AllReduce(name, group, algorithm=self.algorithm, lane=self._lane(job)) for name in sent.values()),
        )

    def _take(self, fragment: int, job: Job) -> Body:
        pieces = self._pieces(fragment, job)
        share = self.mixing
        anchors, outer = (tuple(f"{name}{each}" for each in pieces) for name in ("anchor", "outer"))
        return (
            *(ops.Copy(f"wire{each}", f"outer{each}") for each in pieces if self._wire_dtype(job)),
            ops.Optimize(anchors, outer, optimizer="outer"),
            *(
                ops.Combine((f"anchor{each}", f"param{each}"), (1 - share, share), f"param{each}")
                if share
                else ops.Copy(f"anchor{each}", f"param{each}")
                for each in pieces
            ),
        )

    def _end_warmup(self, job: Job) -> Body:
        return tuple(ops.Copy(name, name.replace(parts.PARAM, "anchor")) for name in self._parameters(job))
