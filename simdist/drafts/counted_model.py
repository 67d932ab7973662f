"""PyTorch models as workloads: tensors and FLOPs are counted, not run."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from simdist.errors import ScenarioError
from simdist.jobs.asking import ask
from simdist.plan.plan import ITEM_NBYTES
from simdist.scenario import Tensor, Workload
from simdist.settings.base import plural, shown
from simdist.settings.precision import Precision, Utilization
from simdist.settings.units import format_flops, format_nbytes
from simdist.studies.columns import Column, count
from simdist.studies.tables import table_text

_COMMAND = (sys.executable, "-m", "real.workload")
_DTYPES = get_args(Workload.model_fields["dtype"].annotation)
_TIME_LIMIT_S = 3600.0
_MOST_ELEMENTS = 10**9  # of a sample
_MOST_LENGTH = 200  # of a name
_SHOWN = 10  # tensors
_SAMPLE = "return (module, sample batch), or write --input, e.g. --input 3x224x224"


_COLUMNS = (
    Column("tensor", "name"),
    Column("elements", "count", form=count),
    Column("size", "nbytes", form=format_nbytes),
    Column("forward", "flops", form=format_flops),
)


@dataclass(frozen=True)
class CountedModel:
    """What was counted of a PyTorch model."""

    model: str
    counted: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """Return what was counted as JSON.

        Columns:
            model, dtype (str): Module and function; type of most elements.
            parameters, nbytes (int): Elements and size of all trained tensors.
            frozen_parameters, buffers_nbytes (int): Frozen elements and size of buffers, which are not exchanged.
            flops (float or null): Forward FLOPs per sample. `null` without a sample.
            batch_size (int or null): Samples of the returned batch, if any.
            sample_nbytes (int): Size of a sample. 0: unknown.
            tensors (list): "Tensors of a model", in forward order.
            remarks (list): What the numbers do not show (str).
        """
        return self.counted

    def text(self) -> str:
        """Return a line about the model, and a table of its largest tensors."""
        counted = self.counted
        tensors = counted["tensors"]
        size = f"{counted['parameters']:,} parameters, {format_nbytes(counted['nbytes'])} of {counted['dtype']}"
        flops = counted["flops"]
        forward = "FLOPs are not known" if flops is None else f"forward {format_flops(flops)} per sample"
        told = f"{counted['model']}: {len(tensors):,} {plural(len(tensors), 'tensor')}, {size}; {forward}"
        largest = sorted(tensors, key=lambda each: -each["count"])[:_SHOWN]
        shown = [each for each in tensors if each in largest]
        title = "tensors" if len(shown) == len(tensors) else f"the {len(shown)} largest tensors"
        return f"{told}\n\n{table_text(title, _COLUMNS, shown)}"

    def workload(
        self,
        *,
        precision: Precision,
        forward_s: float | None = None,
        utilization: str | None = None,
        batch_size: int | None = None,
    ) -> Workload:
        """Return the workload that scenarios take.

        Args:
            precision: Precision of its arithmetic.
            forward_s: Seconds of a forward pass.
            utilization: Share of the device's peak in that precision, such as `40%`.
            batch_size: Samples per GPU and pass; None for those of the returned batch.

        Raises:
            ScenarioError: Nothing tells the batch, or how long the passes take.
        """
        counted = self.counted
        shares = _utilization(precision, utilization)
        chosen = batch_size or counted["batch_size"]
        if chosen is None:
            raise ScenarioError("--batch-size: how many samples has a GPU in a pass? Write e.g. --batch-size 32")
        if forward_s is None and not counted["flops"]:
            known = "the forward pass multiplies no matrices" if counted["flops"] == 0 else "FLOPs are not known"
            raise ScenarioError(f"{self.model}: {known}, so no time follows: write --forward, or {_SAMPLE}")
        kept = ("name", "count", "rows", "flops")
        try:
            return Workload(
                name=self.model.partition(":")[2],
                source=f"simdist init --from {self.model}",
                tensors=tuple(Tensor(**{key: each[key] for key in kept}) for each in counted["tensors"]),
                dtype=counted["dtype"],
                precision=precision,
                batch_size=chosen,
                measured_batch_size=None if forward_s is None else chosen,
                sample_nbytes=counted["sample_nbytes"],
                forward_s=forward_s,
                utilization=shares,
            )
        except ValidationError as error:
            raise ScenarioError(f"{self.model}: {error.errors()[0]['msg']}") from None


def is_model(name: str) -> bool:
    """Tell whether a text names a function of a module, not a file."""
    return ":" in name and not Path(name).exists()


def count_model(model: str, *, shape: str | None = None, device: str = "meta") -> CountedModel:
    """Count tensors and FLOPs of a PyTorch model, in a process of its own.

    Args:
        model: `module:function`. The function takes no arguments and returns a module, or (module, sample batch).
        shape: Shape of a sample, such as `3x224x224`, if the function returns none.
        device: `meta`, where tensors have shapes but no values, or `cpu`.

    Raises:
        ScenarioError: There is no such model, it cannot be counted, or nothing of it is trained.
    """
    if len(model) > _MOST_LENGTH:
        raise ScenarioError(f"{shown(model)}: has {len(model):,} characters: write module:function")
    request = {"model": model, "device": device} | ({"input_shape": _shape(shape)} if shape else {})
    [*_, answer] = ask(_COMMAND, request, what=model, time_limit_s=_TIME_LIMIT_S, shows_output=True)
    return CountedModel(model, _counted(model, answer, has_shape=shape is not None))


def _utilization(precision: Precision, share: str | None) -> Utilization:
    if share is None:
        return Utilization()
    try:
        return Utilization.model_validate({precision: share})
    except ValidationError as error:
        raise ScenarioError(f"--utilization: {error.errors()[0]['msg']}") from None


def _shape(text: str) -> list[int]:
    parts = text.replace(",", "x").split("x")
    is_right = all(part.strip().isdecimal() and len(part) < 20 and int(part) for part in parts)
    if not is_right or math.prod(map(int, parts)) > _MOST_ELEMENTS:
        hint = "write the shape of a sample, e.g. 3x224x224, or 1024 for so many tokens"
        raise ScenarioError(f"--input {shown(text)}: {hint}; it has {_MOST_ELEMENTS:,} elements or less")
    return [int(part) for part in parts]


def _counted(model: str, answer: dict[str, Any], *, has_shape: bool) -> dict[str, Any]:
    """Return what was counted, see `CountedModel.document`."""
    n_samples: int | None = answer["n_samples"]
    sizes: dict[str, int] = {}
    for each in answer["tensors"]:
        sizes[each["dtype"]] = sizes.get(each["dtype"], 0) + each["count"]
    if not sizes:
        raise ScenarioError(f"{model}: has no parameter that is trained: nothing is exchanged")
    dtype = max(sizes, key=lambda name: sizes[name])
    if dtype not in _DTYPES:
        raise ScenarioError(f"{model}: most parameters are {dtype}: convert it to {', '.join(_DTYPES)}")
    tensors = [_tensor(each, n_samples, ITEM_NBYTES[dtype]) for each in answer["tensors"] if each["count"]]
    return {
        "model": model,
        "parameters": sum(sizes.values()),
        "dtype": dtype,
        "nbytes": sum(each["nbytes"] for each in tensors),
        "frozen_parameters": answer["frozen_parameters"],
        "buffers_nbytes": answer["buffers_nbytes"],
        "flops": sum(each["flops"] for each in tensors) if n_samples else None,
        "batch_size": None if has_shape else n_samples,
        "sample_nbytes": answer["batch_nbytes"] // n_samples if n_samples else 0,
        "tensors": tensors,
        "remarks": list(_remarks(answer, sizes, dtype)),
    }


def _tensor(found: dict[str, Any], n_samples: int | None, item_nbytes: int) -> dict[str, Any]:
    """Return a tensor as JSON.

    Columns:
        name (str): Name of its parameter.
        count, rows, nbytes (int): Elements, first dimension, size.
        flops (float): Forward FLOPs per sample. 0 without a sample.
    """
    return {
        **{key: found[key] for key in ("name", "count", "rows")},
        "nbytes": found["count"] * item_nbytes,
        "flops": found["flops"] / (n_samples or 1),
    }


def _remarks(answer: dict[str, Any], sizes: dict[str, int], dtype: str) -> Iterator[str]:
    """Yield what the numbers do not show."""
    if answer["n_samples"] is None:
        yield f"without a sample, tensors stand in the order of their definition and FLOPs are not known: {_SAMPLE}"
    others = [name for name in sizes if name != dtype]
    if others:
        n_others = sum(sizes[name] for name in others)
        yield f"{n_others:,} elements are {', '.join(others)}: they count as {dtype}, the type of most"
    unused = [each["name"] for each in answer["tensors"] if not each["is_used"]]
    if unused:
        named = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        are = f"{len(unused)} {plural(len(unused), 'tensor')} ({named})"
        yield f"the forward pass does not use {are}: DistributedDataParallel needs find_unused_parameters=True"
    if answer["frozen_parameters"] and answer["n_samples"]:
        frozen = f"{answer['frozen_parameters']:,} elements are frozen and not exchanged"
        yield f"{frozen}; a backward pass of twice the forward pass is then too long: write `backward` in the workload"
