"""What hooks of modules share: whom they tell, staying out of compiled graphs, and finding the tensors of an output."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Protocol

import torch
from torch import Tensor


class Handle(Protocol):
    """Removes a hook."""

    def remove(self) -> None:
        """Remove the hook."""


class Meets(Protocol):
    """Notes arrivals and leaves."""

    def arrive(self) -> None:
        """Note that this rank begins to wait for others."""

    def leave(self) -> None:
        """Note that the exchange is done."""


def not_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep a hook out of compiled graphs, also of a module that is compiled in place with `fullgraph=True`."""
    apart: Callable[..., None] = torch.compiler.disable(hook)
    return apart


def tensors_in(output: object) -> Iterator[Tensor]:
    """Yield the tensors of an output of a module, or of its inputs."""
    match output:
        case Tensor():
            yield output
        case Mapping():
            for value in output.values():
                yield from tensors_in(value)
        case list() | tuple():
            for value in output:
                yield from tensors_in(value)
        case _ if is_dataclass(output):
            for each in fields(output):
                yield from tensors_in(getattr(output, each.name))
