"""`python -m real.workload`: build a model on torch's meta device, and tell its tensors and FLOPs.

One JSON object on standard input says what to do, and one on standard output answers.
"""

import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TextIO

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before torch: what a model compiles cannot be counted

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves, tree_map

from real.models.counting import count_tensors
from simdist.errors import ScenarioError, SimdistError
from simdist.settings.base import shown
from simdist.settings.plugins import load_reference

_FORM = "module:function, such as torchvision.models:resnet50"
_RETURNS = "return the module, or (module, sample batch)"
_MOST_LENGTH = 500  # of a foreign error
_GIVE_A_SAMPLE = "return (module, sample batch), or write --input with the shape of a sample"
_FOREIGN = (Path(torch.__file__).parent, Path(__file__).parent)  # folders of code that is not the user's
_N_SAMPLES = 2  # of a batch of our own: batch normalisation takes no single sample of one pixel


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class _CountingRequest:
    """What to count."""

    model: str
    input_shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] | None = None
    device: Literal["meta", "cpu"] = "meta"


class _Built(NamedTuple):
    """A model, and a batch of samples if there is one."""

    module: nn.Module
    batch: object | None


def main(given: TextIO, out: TextIO) -> int:
    """Answer a request and return the exit code: 0, or 2 for wrong input."""
    answer: Mapping[str, object]
    with redirect_stdout(sys.stderr):  # what a model prints is no answer
        try:
            answer = _answer(TypeAdapter(_CountingRequest).validate_json(given.read()))
            code = 0
        except SimdistError as error:
            answer = {"error": str(error)}
            code = 2
    out.write(f"{json.dumps(answer)}\n")
    out.flush()
    return code


def _answer(request: _CountingRequest) -> Mapping[str, object]:
    module, batch = _build(request)
    if batch is None and any(isinstance(each, UninitializedParameter) for each in module.parameters()):
        raise ScenarioError(f"lazy layers get their sizes from a sample: {_GIVE_A_SAMPLE}")
    forward = None if batch is None else _forward(module, batch)
    with _explaining("its forward pass", request.device):
        found = count_tensors(module, forward)
    arrays = [each for each in tree_leaves(batch) if isinstance(each, Tensor) and each.dim()]
    return {
        "tensors": [asdict(each) for each in found],
        "frozen_parameters": sum(each.numel() for each in module.parameters() if not each.requires_grad),
        "buffers_nbytes": sum(each.nbytes for each in module.buffers()),
        "n_samples": len(arrays[0]) if arrays else None,
        "batch_nbytes": sum(each.nbytes for each in arrays),
    }


def _build(request: _CountingRequest) -> _Built:
    """Return the model, and the batch that comes with it or has the requested shape."""
    try:
        found = load_reference(request.model, Path(), form=_FORM, is_wanted=callable)
    except ValueError as error:
        raise ScenarioError(str(error).removeprefix(f"{shown(request.model)}: ")) from None
    if isinstance(found, nn.Module):
        made: object = found
    elif callable(found):
        _check_takes_nothing(found)
        with torch.device(request.device), _explaining("building it", request.device):
            made = found()
    else:
        raise ScenarioError(f"is no function, but {_kind(found)}: write a function, and {_RETURNS}")
    module, batch = _module_and_batch(made)
    shape = request.input_shape
    if shape and batch is not None:
        raise ScenarioError("returns a sample batch already: leave --input out")
    if shape:
        reads_tokens = any(isinstance(each, nn.Embedding) for each in module.modules())
        dtype = torch.long if reads_tokens else _dtype_of(module)
        with _explaining("a sample of this shape", request.device):
            batch = torch.zeros(_N_SAMPLES, *shape, dtype=dtype, device=request.device)
    return _Built(*(_moved(each, request.device) for each in (module, batch)))


def _check_takes_nothing(function: Callable[..., object]) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it is not written in Python
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]
    if needed:
        raise ScenarioError(f"needs arguments ({', '.join(needed)}): write a function without any that calls it")


def _module_and_batch(made: object) -> _Built:
    match made:
        case nn.Module():
            return _Built(made, None)
        case (nn.Module() as module, batch) if any(isinstance(each, Tensor) for each in _leaves(batch)):
            return _Built(module, batch)
        case tuple() | list():
            raise ScenarioError(f"returns ({', '.join(map(_kind, made))}): {_RETURNS}")
        case _:
            raise ScenarioError(f"returns {_kind(made)}: {_RETURNS}")


def _forward(module: nn.Module, batch: object) -> Callable[[], object]:
    """Return a forward pass of a batch: one input, several, or inputs by name.

    Of inputs and targets, as a data loader yields them, only the inputs are given to a module that takes one input.
    """
    if isinstance(batch, Mapping):
        return lambda: module(**batch)
    inputs = batch if isinstance(batch, tuple | list) else (batch,)
    try:
        inspect.signature(module.forward).bind(*inputs)
    except TypeError:
        return lambda: module(inputs[0])
    return lambda: module(*inputs)


def _moved(value: Any, device: str) -> Any:
    """Return a module or a batch on a device."""
    if isinstance(value, nn.Module):
        elsewhere = any(each.device.type != device for each in (*value.parameters(), *value.buffers()))
        return value.to(device) if elsewhere else value
    if isinstance(value, Mapping):
        value = dict(value)  # also of a class of its own, which trees of torch do not look into
    return tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, value)


def _leaves(batch: object) -> list[object]:
    return tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


@contextmanager
def _explaining(what: str, device: str) -> Iterator[None]:
    """Turn any error of the user's code into one that says where it happened."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if not any(Path(each.filename).is_relative_to(folder) for folder in _FOREIGN)]
        at = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
        told = " ".join(str(error).split())[:_MOST_LENGTH]
        is_of_meta = device == "meta" and "meta" in told
        hint = "; tensors of the meta device have no values: write --device cpu" if is_of_meta else ""
        raise ScenarioError(f"{what} fails: {at}{type(error).__name__}: {told}{hint}") from error


if __name__ == "__main__":
    sys.exit(main(sys.stdin, sys.stdout))
