"""`simdist workload`."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import ValidationError

from simdist.cli import common, inputs
from simdist.errors import ScenarioError
from simdist.jobs.asking import ask
from simdist.plan.plan import ITEM_NBYTES
from simdist.scenario import Tensor, Workload, dump_workload
from simdist.settings.base import plural, shown
from simdist.settings.precision import Precision, Utilization
from simdist.settings.units import format_flops, format_nbytes, parse_seconds
from simdist.studies.columns import Column, count
from simdist.studies.tables import table_text

_COMMAND = (sys.executable, "-m", "real.workload")
_DTYPES = get_args(Workload.model_fields["dtype"].annotation)
_TIME_LIMIT_S = 3600.0
_MOST_ELEMENTS = 10**9  # of a sample
_MOST_LENGTH = 200  # of a name
_SHOWN = 10  # tensors
_SAMPLE = "return (module, sample batch), or write --input, e.g. --input 3x224x224"
_HOW_LONG = "how long does the forward pass take? Write --utilization, e.g. 40%, or --forward, e.g. 20ms"


_COLUMNS = (
    Column("tensor", "name"),
    Column("elements", "count", form=count),
    Column("size", "nbytes", form=format_nbytes),
    Column("forward", "flops", form=format_flops),
)


@dataclass(frozen=True, slots=True)
class _Timing:
    """What tells how long the model takes.

    Args:
        forward_s: Seconds of a forward pass.
        utilization: Share of the device's peak.
        precision: Precision of its arithmetic.
    """

    forward_s: float | None
    utilization: Utilization
    precision: Precision


@click.command("workload")
@click.argument("model", metavar="MODULE:FUNCTION")
@click.option("-o", "--output", type=common.path, metavar="FILE", help="The .yaml file to write.")
@click.option("--input", "shape", metavar="SHAPE", help="Shape of a sample, e.g. 3x224x224, if none is returned.")
@click.option("--batch-size", type=common.positive, help="Samples per GPU and pass.  [default: of the returned batch]")
@click.option("--utilization", metavar="SHARE", help="Share of the GPU's peak that the passes reach.")
@click.option("--forward", metavar="TIME", help="Of a forward pass, in place of --utilization.")
@click.option("--precision", type=click.Choice(get_args(Precision)), default="fp32", help="Of the arithmetic.")
@click.option("--device", type=click.Choice(["meta", "cpu"]), default="meta", help="cpu: with values, in memory.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@common.options
def command(  # noqa: PLR0913 (one for each option)
    session: common.Session,
    *,
    model: str,
    output: Path | None,
    shape: str | None,
    batch_size: int | None,
    utilization: str | None,
    forward: str | None,
    precision: Precision,
    device: str,
    force: bool,
) -> None:
    """Turn a PyTorch model into a workload.

    The function takes no arguments and returns a module, or (module, sample batch). It runs on the meta device, where
    tensors have shapes but no values, so a model may be larger than memory.
    """
    if len(model) > _MOST_LENGTH:
        raise ScenarioError(f"{shown(model)}: has {len(model):,} characters: write module:function")
    timing = _timing(forward, utilization, precision)
    if output and timing is None:
        raise ScenarioError(f"-o {output}: {_HOW_LONG}")
    if output and output.exists() and not force:
        raise ScenarioError(f"{output}: is there already; replace it with --force")
    request = {"model": model, "device": device} | ({"input_shape": _shape(shape)} if shape else {})
    [*_, answer] = ask(_COMMAND, request, what=model, time_limit_s=_TIME_LIMIT_S, shows_output=True)
    counted = _counted(model, answer, has_shape=shape is not None)
    for remark in counted["remarks"]:
        session.say(f"warning: {model}: {remark}")
    if output and timing:
        workload = _workload(counted, timing, batch_size)
        inputs.save_text(output, dump_workload(workload))
        session.wrote(output)
    session.result(counted, _text(counted))


def _timing(forward: str | None, utilization: str | None, precision: Precision) -> _Timing | None:
    """Return what the options tell of the model's time, None if they tell nothing."""
    if forward is None and utilization is None:
        return None
    if forward is not None and utilization is not None:
        raise ScenarioError("--utilization beside --forward: write one of them")
    forward_s = None if forward is None else common.parsed("--forward", forward, parse_seconds)
    try:
        shares = Utilization() if utilization is None else Utilization.model_validate({precision: utilization})
    except ValidationError as error:
        raise ScenarioError(f"--utilization: {error.errors()[0]['msg']}") from None
    return _Timing(forward_s, shares, precision)


def _shape(text: str) -> list[int]:
    parts = text.replace(",", "x").split("x")
    is_right = all(part.strip().isdecimal() and len(part) < 20 and int(part) for part in parts)
    if not is_right or math.prod(map(int, parts)) > _MOST_ELEMENTS:
        hint = "write the shape of a sample, e.g. 3x224x224, or 1024 for so many tokens"
        raise ScenarioError(f"--input {shown(text)}: {hint}; it has {_MOST_ELEMENTS:,} elements or less")
    return [int(part) for part in parts]


def _counted(model: str, answer: dict[str, Any], *, has_shape: bool) -> dict[str, Any]:
    """Return what was counted as JSON.

    Columns:
        model (str): Module and function.
        parameters (int): Elements of all trained tensors.
        dtype (str): Type of most of them.
        nbytes (int): Their size in that type.
        frozen_parameters (int): Elements that are not trained and not exchanged.
        buffers_nbytes (int): Size of buffers, which are not exchanged.
        flops (float or null): Forward FLOPs per sample. `null` without a sample.
        batch_size (int or null): Samples of the returned batch. `null` if none was returned.
        sample_nbytes (int): Size of a sample. 0 if it is not known.
        tensors (list): "Tensors of a model", in forward order.
        remarks (list): What the numbers do not show (str).
    """
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
        count (int): Elements.
        rows (int): Its first dimension.
        nbytes (int): Its size.
        flops (float): Forward FLOPs per sample that count for it. 0 without a sample.
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


def _workload(counted: dict[str, Any], timing: _Timing, batch_size: int | None) -> Workload:
    """Return the workload that scenarios take."""
    model = counted["model"]
    chosen = batch_size or counted["batch_size"]
    if chosen is None:
        raise ScenarioError("--batch-size: how many samples has a GPU in a pass? Write e.g. --batch-size 32")
    if timing.forward_s is None and not counted["flops"]:
        known = "the forward pass multiplies no matrices" if counted["flops"] == 0 else "FLOPs are not known"
        raise ScenarioError(f"--utilization: {known}, so no time follows: write --forward, or {_SAMPLE}")
    kept = ("name", "count", "rows", "flops")
    try:
        return Workload(
            name=model.partition(":")[2],
            source=f"simdist workload {model}",
            tensors=tuple(Tensor(**{key: each[key] for key in kept}) for each in counted["tensors"]),
            dtype=counted["dtype"],
            precision=timing.precision,
            batch_size=chosen,
            sample_nbytes=counted["sample_nbytes"],
            forward_s=timing.forward_s,
            utilization=timing.utilization,
        )
    except ValidationError as error:
        raise ScenarioError(f"{model}: {error.errors()[0]['msg']}") from None


def _text(counted: dict[str, Any]) -> str:
    """Return a line about the model, and a table of its largest tensors."""
    tensors = counted["tensors"]
    size = f"{counted['parameters']:,} parameters, {format_nbytes(counted['nbytes'])} of {counted['dtype']}"
    flops = counted["flops"]
    forward = "FLOPs are not known" if flops is None else f"forward {format_flops(flops)} per sample"
    told = f"{counted['model']}: {len(tensors):,} {plural(len(tensors), 'tensor')}, {size}; {forward}"
    largest = sorted(tensors, key=lambda each: -each["count"])[:_SHOWN]
    shown = [each for each in tensors if each in largest]
    title = "tensors" if len(shown) == len(tensors) else f"the {len(shown)} largest tensors"
    return f"{told}\n\n{table_text(title, _COLUMNS, shown)}"
