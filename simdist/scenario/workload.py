"""The training job on one GPU: the model's tensors, the batch, and how long its compute takes."""

import csv
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, ValidationInfo, model_validator

from simdist.files import read_content
from simdist.plan.optimizers import OptimizerName
from simdist.plan.plan import ITEM_NBYTES
from simdist.scenario.cluster import SecondsOfKinds, SecondsOrNone
from simdist.scenario.effects import WITHOUT_DATA, Uses
from simdist.scenario.transformer import Transformer
from simdist.schedules.units import ModelUnit, units_of_names, units_of_sizes
from simdist.settings.base import Fault, Settings, folder_of, refuse, shown
from simdist.settings.precision import MeasuredBatch, Precision, Utilization
from simdist.settings.units import Fraction, Nbytes, Seconds, Whole, format_seconds, parse_seconds, read_number

#: Passes of a step: a plan has operations for each of them.
MAX_MICRO_BATCHES = 4096

_COLUMNS = ["name", "count", "flops"]
_FORWARD = 1 / 3  # of the time of both passes, where only that is known
_ROWS = "rows"  # a column that may be left out
#: Keys and attributes that say how long passes take, or at which batch size that was measured.
TIMES = {"forward", "forward_s", "step_times", "measured_batch_size", "tensors", "tensors_file", "preset", "file"}


class Tensor(Settings):
    """A parameter tensor: its elements, the forward FLOPs per sample of its layer, or measured backward seconds.

    A multiply-add counts as 2 FLOPs. A layer with several tensors (weight, bias) states its FLOPs on one of them.
    `backward_s` is the part of a backward pass, at device speed 1, that ends when this gradient is ready, `forward_s`
    the part of a forward pass that computes with this tensor. `rows` are those of the tensor as a matrix, its first
    dimension; without, it is a vector. `activations` are the numbers that the layer leaves for the backward pass of one
    sample, in the type of the arithmetic, and `float32_activations` those that it leaves in float32.
    """

    name: str
    count: Annotated[Whole, Field(ge=1, le=10**15)]
    flops: Annotated[float, Field(ge=0, le=1e24, allow_inf_nan=False)] = 0.0
    forward_s: Annotated[Seconds | None, Field(exclude_if=lambda seconds: seconds is None)] = None
    backward_s: Seconds | None = None
    rows: Annotated[Whole | None, Field(ge=1, exclude_if=lambda rows: rows is None)] = None
    activations: Annotated[Whole, Field(ge=0, exclude_if=lambda count: count == 0)] = 0
    float32_activations: Annotated[Whole, Field(ge=0, exclude_if=lambda count: count == 0)] = 0

    @model_validator(mode="after")
    def _is_a_matrix(self) -> Self:
        if self.rows and self.count % self.rows:
            refuse(
                "Tensor", [(("rows",), f"{self.rows} do not divide {self.count} elements: write its first dimension")]
            )
        return self


class MeasuredStep(Settings):
    """A measured step of one GPU: `batch_size` and `time` in a file; in Python also a tuple `(batch_size, time_s)`."""

    batch_size: Annotated[Whole, Field(ge=1)]
    time_s: Annotated[Seconds, Field(gt=0)]

    @model_validator(mode="before")
    @classmethod
    def _from_tuple(cls, value: Any) -> Any:
        is_pair = isinstance(value, tuple) and len(value) == 2
        return {"batch_size": value[0], "time_s": value[1]} if is_pair else value


@dataclass(frozen=True, slots=True)
class Activations:
    """What a forward pass of one sample leaves in memory for the backward pass.

    Args:
        kept_nbytes: By tensor, bytes that stay until the tensor's backward pass.
        again_nbytes: By tensor, bytes that its backward pass computes again.
    """

    kept_nbytes: tuple[float, ...]
    again_nbytes: tuple[float, ...]


class _Short(str):
    """Text that `repr` shows as it is."""

    def __repr__(self) -> str:
        return str(self)


class WorkloadLaunches(SecondsOfKinds):
    """The host's time for launching the kernels of a model, whatever its batch size.

    Args:
        forward_s: Seconds of a forward pass and its loss.
        backward_s: Seconds of a backward pass.
        optimize_s: Seconds of an update.
    """

    forward_s: SecondsOrNone = 0.0
    backward_s: SecondsOrNone = 0.0
    optimize_s: SecondsOrNone = 0.0

    @property
    def passes_s(self) -> float:
        """Seconds of a forward and a backward pass."""
        return self.forward_s + self.backward_s


def _of_both_passes(value: object) -> object:
    """Read one time as that of both passes, a third of it forward."""
    if not isinstance(value, str):
        return value
    seconds = parse_seconds(value)
    return WorkloadLaunches(forward_s=seconds * _FORWARD, backward_s=seconds * (1 - _FORWARD))


_Launches = Annotated[
    WorkloadLaunches,
    BeforeValidator(_of_both_passes),
    Field(exclude_if=lambda launches: launches == WorkloadLaunches()),
]


class Workload(Settings):
    """A model and its batch. Compute time is stated in seconds, or follows from FLOPs and `utilization`.

    The time of other batch sizes follows from `step_times`, or from `measured_batch_size` in proportion.

    Args:
        name: For people.
        source: Where the numbers are from.
        tensors: In forward order. In a file the list, `tensors_file`, a CSV with columns name, count, flops and, if
            known, rows, or `transformer`, the sizes of one.
        units: Number of tensors in each unit of a sharded model, in forward order: what is gathered and reduced
            together, such as a layer. By default the names tell: a unit for each numbered block.
        dtype: Of parameters and gradients, as they are stored and sent.
        precision: Of the arithmetic of forward and backward pass. Mixed precision is fp16 with dtype float32.
        batch_size: Samples per GPU and pass: with several passes a step, of a micro-batch.
        micro_batches: Passes of a step: forward and backward passes before one update, exchanged in the last one.
        activation_nbytes: Bytes that a forward pass of one sample leaves for the backward pass.
        kept_activation_nbytes: With activation checkpointing: those that stay until the backward pass, such as the
            inputs of the layers. A unit's others are computed again when its turn comes.
        sample_nbytes: Bytes of one input sample, decoded, as it travels from host memory to the GPU; without a data
            set also as it travels from storage.
        measured_batch_size: Batch size that `forward_s` and `backward_s` were measured at. They are then proportional
            to `batch_size`. If absent, they are the seconds of any batch.
        utilization_batch_size: Batch size that `utilization` was measured at: one for any precision, or by precision.
        utilization_ranks: GPUs that `utilization` was measured on together. A rate of several contains what a full
            machine loses, and communication that is not hidden.
        step_times: Measured steps of one GPU by batch size, forward, backward and update, at device speed 1: instead of
            `forward_s` and `backward_s`. One third of the passes is forward.
        launches: The host's seconds for launching the kernels of a pass and of an update. One time is that of both
            passes. Without effect if each pass takes its device longer.
        forward_s: Seconds of a forward pass at device speed 1; if absent the sum of the tensors' or, where they state
            none, FLOPs / (peak * utilization).
        backward_s: Seconds of a backward pass; if absent the sum of the tensors' or, where they state none,
            twice the forward pass, and `recompute`.
        recompute: Share of the forward pass of blocks that the backward pass computes again: activation checkpointing,
            1 for all of it. A stated or measured backward pass includes it. A model without blocks is one block.
        optimizer: `sgd` with momentum; `adamw`, also Adam, with two moments; or `lars`, with trust ratios of all
            tensors, computed before the update.
        optimizer_nbytes: Bytes that the optimizer needs for each parameter, besides parameter and gradient: its state,
            and what an update needs. If absent, one or two numbers of `dtype`, as the optimizer has.
        optimize_s: Seconds of a step's optimizer, without trust ratios; from the memory traffic if absent.
        trust_ratios_s: Seconds of the trust ratios of all tensors, an equal part for each; from the memory traffic if
            absent.
        decode_s: CPU seconds to decode one sample.
        utilization: Share of the device's peak FLOP/s that forward and backward reach: one for any precision, or by
            precision. Above 1 (at most 2) where fewer operations are needed than are counted.

    >>> Workload(tensors=(Tensor(name="w", count=1000),), batch_size=8, forward_s=0.01).nbytes
    4000
    """

    name: str = ""
    source: str = ""
    tensors: Annotated[tuple[Tensor, ...], Field(min_length=1, examples=["[{name: weight, count: 1000}]"])]
    units: Annotated[
        tuple[Annotated[Whole, Field(ge=1)], ...], Field(exclude_if=lambda units: not units, examples=["[1, 12, 12]"])
    ] = ()
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    precision: Precision = "fp32"
    batch_size: Annotated[Whole, Field(ge=1)]
    micro_batches: Annotated[Whole, Field(ge=1, le=MAX_MICRO_BATCHES, exclude_if=lambda count: count == 1)] = 1
    sample_nbytes: Nbytes = 0
    activation_nbytes: Annotated[Nbytes | None, Field(exclude_if=lambda nbytes: nbytes is None)] = None
    kept_activation_nbytes: Annotated[Nbytes | None, Field(exclude_if=lambda nbytes: nbytes is None)] = None
    measured_batch_size: Annotated[Whole | None, Field(ge=1, exclude_if=lambda size: size is None)] = None
    step_times: Annotated[tuple[MeasuredStep, ...], Field(exclude_if=lambda times: not times)] = ()
    launches: _Launches = WorkloadLaunches()
    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    recompute: Annotated[Fraction, Field(exclude_if=lambda share: share == 0)] = 0.0
    optimizer: OptimizerName = "sgd"
    optimizer_nbytes: Annotated[Nbytes | None, Field(exclude_if=lambda nbytes: nbytes is None)] = None
    optimize_s: Seconds | None = None
    trust_ratios_s: Seconds | None = None
    decode_s: Seconds = 0.0
    utilization: Utilization = Utilization()
    utilization_batch_size: Annotated[MeasuredBatch, Field(exclude_if=lambda sizes: not sizes.stated)] = MeasuredBatch()
    utilization_ranks: Annotated[Whole, Field(ge=1, le=1_000_000, exclude_if=lambda n_ranks: n_ranks == 1)] = 1

    @property
    def tensor_counts(self) -> tuple[int, ...]:
        """Elements of each tensor, in forward order."""
        return tuple(tensor.count for tensor in self.tensors)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Name of each tensor, in forward order."""
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def tensor_rows(self) -> tuple[int, ...]:
        """Rows of each tensor as a matrix, for a vector as many as elements."""
        return tuple(tensor.rows or tensor.count for tensor in self.tensors)

    @property
    def sharded_units(self) -> tuple[ModelUnit, ...]:
        """Units of the model if it is sharded: as `units` states, or a unit for each block that the names tell."""
        return units_of_sizes(self.units) if self.units else units_of_names(self.tensor_names)

    @property
    def recomputed_shares(self) -> tuple[float, ...]:
        """Share of the forward pass of each tensor that the backward pass computes again."""
        shares = [0.0] * len(self.tensors)
        for unit in self.blocks:
            shares[unit.first : unit.last] = [self.recompute] * (unit.last - unit.first)
        return tuple(shares)

    @property
    def activations(self) -> Activations | None:
        """What a forward pass leaves for the backward pass; None if it is not known.

        As stated, in proportion to FLOPs or else to elements. Otherwise as the tensors state: with `recompute` of all,
        only what the first tensor of each block leaves stays, which is the block's input.
        """
        if self.activation_nbytes is not None:
            kept_nbytes = self.activation_nbytes if self.kept_activation_nbytes is None else self.kept_activation_nbytes
            again_nbytes = self.activation_nbytes - kept_nbytes
            weights = (
                [tensor.flops or 0.0 for tensor in self.tensors] if self.flops else [*map(float, self.tensor_counts)]
            )
            whole = math.fsum(weights)
            shares = [weight / whole for weight in weights]
            return Activations(
                tuple(kept_nbytes * share for share in shares), tuple(again_nbytes * share for share in shares)
            )
        if self.recompute not in (0, 1) or not any(tensor.activations for tensor in self.tensors):
            return None
        item_nbytes = 2 if self.precision in ("fp16", "bf16") else 4
        left = [item_nbytes * each.activations + 4 * each.float32_activations for each in self.tensors]
        again = [0] * len(left)
        if self.recompute:
            for unit in self.blocks:
                for tensor in range(unit.first + 1, unit.last):
                    again[tensor] = left[tensor]
        return Activations(tuple(a - b for a, b in zip(left, again, strict=True)), tuple(again))

    @property
    def blocks(self) -> tuple[ModelUnit, ...]:
        """The blocks of the model, such as its layers; the whole model if it has none."""
        found = tuple(unit for unit in self.sharded_units if unit.is_block)
        return found or (ModelUnit(0, len(self.tensors)),)

    @property
    def samples_per_step(self) -> int:
        """Samples of one rank in a step."""
        return self.batch_size * self.micro_batches

    @property
    def has_seconds(self) -> bool:
        """Whether the time of passes is stated in seconds, and not in FLOPs."""
        return self.stated_forward_s is not None or bool(self.step_times)

    @property
    def stated_forward_s(self) -> float | None:
        """Seconds of a forward pass as stated: in all, or the sum of the tensors'; None if they follow from others."""
        of_tensors_s = [tensor.forward_s for tensor in self.tensors if tensor.forward_s is not None]
        return math.fsum(of_tensors_s) if of_tensors_s else self.forward_s

    @property
    def batch_over_measured(self) -> float:
        """The batch size over the nearest measured one; 1 if it is measured, or if the measured one is not known."""
        if self.step_times:
            sizes = [each.batch_size for each in self.step_times]
            return self.batch_size / min(max(self.batch_size, sizes[0]), sizes[-1])
        if self.stated_forward_s is not None:
            return self.batch_size / (self.measured_batch_size or self.batch_size)
        return self.batch_size / (self.utilization_batch_size.at(self.precision) or self.batch_size)

    @property
    def measured_ranks(self) -> int:
        """GPUs that the seconds of passes were measured on together; 1 if they are stated in seconds."""
        return 1 if self.has_seconds else self.utilization_ranks

    @property
    def is_of_any_batch(self) -> bool:
        """Whether seconds of passes are stated, but not the batch size that they were measured at."""
        return bool(self.stated_forward_s) and self.measured_batch_size is None

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(self.tensor_counts) * ITEM_NBYTES[self.dtype]

    @property
    def flops(self) -> float:
        """Forward FLOPs per sample."""
        return math.fsum(tensor.flops for tensor in self.tensors)

    @property
    def training_flops(self) -> float:
        """FLOPs per sample of a forward and a backward pass, with what the latter computes again."""
        pairs = zip(self.tensors, self.recomputed_shares, strict=True)
        return math.fsum(tensor.flops * (3 + share) for tensor, share in pairs)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Return attributes and values for `repr`, of the tensors just their number."""
        for name, value in super().__repr_args__():
            yield name, _Short(f"<{len(self.tensors)} tensors>") if name == "tensors" else value

    def unused(self, uses: Uses) -> Iterator[str]:
        """Yield a sentence for each setting without effect."""
        written = self.model_fields_set
        if not uses.has_data and self.decode_s and "decode_s" in written:
            yield f"workload.decode {WITHOUT_DATA}"
        if self.optimizer == "sgd" and self.trust_ratios_s is not None:
            yield "workload.trust_ratios has no effect: with workload.optimizer sgd there are none"
        if self.has_seconds:
            times = "workload.step_times" if self.step_times else "workload.forward"
            stated = {"utilization": bool(self.utilization.stated), "precision": self.precision != "fp32"}
            keys = [key for key, is_stated in stated.items() if is_stated and key in written]
            yield from (f"workload.{key} has no effect: {times} states the time" for key in keys)

    @model_validator(mode="before")
    @classmethod
    def _find_tensors(cls, value: Any, info: ValidationInfo) -> Any:
        """Replace a key that stands for tensors by these."""
        if not isinstance(value, dict):
            return value
        keys = [name for name in ("tensors_file", "transformer", "tensors") if name in value]
        if len(keys) > 1:
            refuse("Workload", [((keys[0],), f"{keys[0]!r} beside {keys[1]!r}: write one of them")])
        rest = {name: item for name, item in value.items() if name not in keys}
        match keys:
            case ["tensors_file"]:
                return rest | {"tensors": cls._tensors_of_file(value["tensors_file"], info)}
            case ["transformer"]:
                return rest | {"tensors": cls._tensors_of_transformer(value["transformer"], info)}
            case _:
                return value

    @classmethod
    def _tensors_of_file(cls, name: object, info: ValidationInfo) -> tuple[Tensor, ...]:
        try:
            if not isinstance(name, str):
                raise ValueError(f"{shown(name)} is not a file: write e.g. resnet50.csv")
            return _read_tensors(folder_of(info) / name)
        except ValueError as error:
            refuse("Workload", [(("tensors_file",), str(error))])
            raise AssertionError from None

    @classmethod
    def _tensors_of_transformer(cls, sizes: object, info: ValidationInfo) -> tuple[Tensor, ...]:
        try:
            found = Transformer.model_validate(sizes, context=info.context)
        except ValidationError as error:
            details = error.errors(include_url=False)
            refuse("Workload", [(("transformer", *each["loc"]), each["msg"]) for each in details])
            raise AssertionError from None
        return _reader().validate_python(found.tensors())

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse("Workload", self._faults())
        return self

    def _faults(self) -> list[Fault]:
        if self.units and sum(self.units) != len(self.tensors):
            hint = "write how many tensors each unit has, in forward order"
            return [(("units",), f"{sum(self.units)} tensors in all units; the model has {len(self.tensors)}: {hint}")]
        if self.kept_activation_nbytes is not None and self.kept_activation_nbytes > (self.activation_nbytes or 0):
            hint = "write activation_size, all that a forward pass leaves, of which this is a part"
            return [(("kept_activation_size",), f"more than activation_size: {hint}")]
        faults = [
            *self._timing_faults("forward", [tensor.forward_s for tensor in self.tensors], self.forward_s),
            *self._timing_faults("backward", [tensor.backward_s for tensor in self.tensors], self.backward_s),
        ]
        if faults:
            return faults[:1]
        forward_s = self.stated_forward_s
        if self.step_times:
            is_timed = any((tensor.forward_s, tensor.backward_s) != (None, None) for tensor in self.tensors)
            return self._step_time_faults(is_timed) or self._name_faults()
        if forward_s is None and not self.utilization.stated:
            hint = "write its seconds, e.g. forward: 20 ms, or utilization: 40% to derive them from FLOPs"
            return [(("forward",), f"how long does the forward pass take? {hint}")]
        if forward_s is None and self.utilization.at(self.precision) is None:
            stated = ", ".join(self.utilization.stated)
            hint = f"write e.g. utilization: {{{self.precision}: 40%}}, or forward: 20 ms"
            return [(("precision",), f"{self.precision} is not in workload.utilization (stated: {stated}): {hint}")]
        if forward_s is None and self.flops == 0:
            return [(("utilization",), "no tensor states its flops, so no time follows: write e.g. forward: 20 ms")]
        return self._name_faults()

    def _timing_faults(self, key: str, of_tensors_s: Sequence[float | None], stated_s: float | None) -> list[Fault]:
        """Return what is wrong with the seconds of a pass: some tensors state theirs, or all and the workload do."""
        timed = [seconds is not None for seconds in of_tensors_s]
        if any(timed) and not all(timed):
            missing = timed.index(False)
            name = self.tensors[timed.index(True)].name
            return [(("tensors", missing, key), f"absent, but {shown(name)} states it: write all or none")]
        if all(timed) and stated_s is not None:
            hint = "it is their sum: leave it out"
            return [((key,), f"{format_seconds(stated_s)} beside seconds of every tensor; {hint}")]
        return []

    def _step_time_faults(self, is_timed: bool) -> list[Fault]:
        other = {
            "forward": self.forward_s is not None,
            "backward": self.backward_s is not None,
            "measured_batch_size": self.measured_batch_size is not None,
            "tensors": is_timed,
        }
        beside = [key for key, is_stated in other.items() if is_stated]
        if beside:
            return [((beside[0],), f"{beside[0]!r} beside step_times: both state times of passes, remove one of them")]
        return _step_faults(self.step_times)

    def _name_faults(self) -> list[Fault]:
        first = {tensor.name: i for i, tensor in reversed(list(enumerate(self.tensors)))}
        return [
            (("tensors", i, "name"), f"{shown(tensor.name)} is the name of tensor {first[tensor.name]} already")
            for i, tensor in enumerate(self.tensors)
            if first[tensor.name] != i
        ]


def other_batch_fault(workload: Workload, batch_size: object, keys: Iterable[object]) -> str | None:
    """Say why the batch size cannot change by itself, if seconds of passes would stay as they are."""
    is_left = workload.is_of_any_batch and TIMES.isdisjoint(keys)
    return unmeasured(batch_size, workload.batch_size) if is_left and batch_size != workload.batch_size else None


def unmeasured(batch_size: object, stated: object) -> str:
    """Say what a batch size lacks beside seconds that were stated with another one."""
    return (
        f"{shown(batch_size)}: seconds of passes were stated with batch_size {stated}, but no size that they were "
        f"measured at: write measured_batch_size: {stated} beside them, and other sizes are in proportion, or "
        f"step_times; or change forward, too"
    )


def _step_faults(measured: Sequence[MeasuredStep]) -> list[Fault]:
    """Return what is wrong with measured steps: they are sorted, and a larger batch takes no less time."""
    found: list[Fault] = []
    for i, (before, each) in enumerate(itertools.pairwise(measured), 1):
        if each.batch_size <= before.batch_size:
            text = f"{each.batch_size} is not above {before.batch_size}: sort by batch_size"
            found.append((("step_times", i, "batch_size"), text))
        elif each.time_s < before.time_s:
            times = f"{format_seconds(each.time_s)} is less than the {format_seconds(before.time_s)} of a smaller batch"
            found.append((("step_times", i, "time"), f"{times}: leave one of them out"))
    return found


def _read_tensors(path: Path) -> tuple[Tensor, ...]:
    """Read a CSV of tensors; lines that begin with `#` are comments. ValueError tells what is wrong."""
    try:
        text = read_content(path).decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {shown(str(path))}: {error}") from None
    return _parse_tensors(text, path)


@functools.lru_cache(maxsize=32)  # scenarios of one study name the same few models
def _parse_tensors(text: str, path: Path) -> tuple[Tensor, ...]:
    """Return the tensors of a file with this text; `path` is for messages."""
    lines = text.splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    header, *rows = list(csv.reader(line for _, line in numbered)) or [[]]
    if header not in (_COLUMNS, [*_COLUMNS, _ROWS]):
        raise ValueError(f"{path} begins with {shown(','.join(header))}: write {','.join(_COLUMNS)}")
    for (number, _), row in zip(numbered[1:], rows, strict=True):
        if len(row) != len(header):
            raise ValueError(f"{path}:{number}: has {len(row)} columns, the first line {len(header)}: is it cut?")
    records = [dict(zip(header, [row[0], *map(_number, row[1:])], strict=True)) for row in rows]
    try:
        return _reader().validate_python(records)
    except ValidationError as error:
        details = error.errors()[0]
        index, *keys = details["loc"]
        where = f"{path}:{numbered[int(index) + 1][0]}"
        raise ValueError(f"{where}: {'.'.join(map(str, keys))}: {details['msg']}") from None


@functools.cache
def _reader() -> TypeAdapter[tuple[Tensor, ...]]:
    return TypeAdapter(tuple[Tensor, ...])


def _number(text: str) -> float | str:
    try:
        return read_number(text, -math.inf, math.inf)
    except ValueError:
        return text
