"""The state that a rank needs to resume as if nothing had happened, packed into bytes.

A state has several *sections*, because ranks often differ in some and agree in others. Under synchronous SGD, all ranks
have the same parameters but their own random numbers. Packing is `torch.save`. Unpacking accepts only plain data and
tensors (`weights_only`), so an untrusted file cannot execute code.
"""

import hashlib
import io
import json
import pickle
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from real.buffers.memory import on_host
from simdist.errors import RunError

# Sections of the trained state. Before the first step, those of rank 0 apply to all ranks.
LEARNED_SECTIONS = ("tensors", "optimizer")
# Those that a replica takes from another one: each has its own random numbers.
SHARED_SECTIONS = (*LEARNED_SECTIONS, "carried")
_SECTIONS = (*SHARED_SECTIONS, "random", "also")
_OUTER = "outer optimizer"


@runtime_checkable
class Stateful(Protocol):
    """An object with a state of plain data and tensors: learning rate schedulers, gradient scalers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore a state."""


@dataclass(frozen=True, slots=True)
class RankState:
    """Packs and restores the state of a rank.

    Args:
        module: Its parameters and buffers.
        optimizer: Optimizer of the module.
        carried: The buffers of the plan, without parameters, that a step passes to later steps, by name.
        device: If it is a GPU, its random numbers belong to the state.
        also: Other objects with a state.
        updating: Holder of the optimizer's state; None if the optimizer holds it itself.
        outer: The outer optimizer, if there is one.
        is_sharded: The model is under `fully_shard`, so its tensors and those of its optimizer are not packed.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    carried: Mapping[str, tuple[Tensor, ...]]
    device: torch.device
    also: Mapping[str, Stateful] = field(default_factory=dict)
    updating: Stateful | None = None
    outer: torch.optim.Optimizer | None = None
    is_sharded: bool = False

    @property
    def sections(self) -> tuple[str, ...]:
        """Names of the sections."""
        return tuple(each for each in _SECTIONS if each not in LEARNED_SECTIONS) if self.is_sharded else _SECTIONS

    def pack(self, section: str) -> Tensor:
        """Return a section as uint8 `[nbytes]`; equal states give equal bytes."""
        file = io.BytesIO()
        torch.save(on_host(self._get(section)), file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)

    def restore(self, section: str, packed: Tensor) -> None:
        """Restore a section.

        Raises:
            RunError: The section belongs to another model, or is not plain data.
        """
        file = io.BytesIO(packed.numpy().data)
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise RunError(
                f"the state of {_NAMES[section]} holds other things than numbers, text, lists, dicts and tensors: "
                f"leave them out of its state_dict()"
            ) from None
        try:
            self._set(section, found)
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise RunError(f"the state of {_NAMES[section]} does not fit: {error}") from error

    def _get(self, section: str) -> Any:
        match section:
            case "tensors":
                return dict(_tensors(self.module))
            case "optimizer":
                return (self.updating or self.optimizer).state_dict()
            case "carried":
                held = {name: list(tensors) for name, tensors in self.carried.items()}
                return held | ({_OUTER: self.outer.state_dict()} if self.outer else {})
            case "random":
                return _random_state(self.device)
            case _:
                return {name: each.state_dict() for name, each in self.also.items()}

    def _set(self, section: str, found: Any) -> None:
        match section:
            case "tensors":
                _copy(dict(_tensors(self.module)), found)
            case "optimizer":
                (self.updating or self.optimizer).load_state_dict(found)
            case "carried":
                for name, tensors in self.carried.items():
                    _copy(dict(enumerate(tensors)), dict(enumerate(found[name])))
                if self.outer:
                    self.outer.load_state_dict(found[_OUTER])
            case "random":
                _set_random_state(found, self.device)
            case _:
                for name, each in self.also.items():
                    each.load_state_dict(found[name])


_NAMES = {
    "tensors": "the model",
    "optimizer": "the optimizer",
    "carried": "the plan's buffers",
    "random": "the random numbers",
    "also": "what `also` names",
}


def fingerprint(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Describe a model by its class, its optimizer's, and the names, shapes and types of all its tensors."""
    tensors = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in _tensors(module)]
    digest = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()[:12]
    n_elements = sum(tensor.numel() for _, tensor in _tensors(module))
    return f"{type(module).__name__} of {n_elements} elements ({digest}) with {type(optimizer).__name__}"


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _copy(targets: Mapping[Any, Tensor], found: Mapping[Any, Tensor]) -> None:
    if targets.keys() != found.keys():
        raise KeyError(f"it has {', '.join(map(str, found))}; needed: {', '.join(map(str, targets))}")
    with torch.no_grad():
        for name, target in targets.items():
            if target.shape != found[name].shape:
                raise ValueError(f"{name} is {tuple(found[name].shape)}; needed: {tuple(target.shape)}")
            target.copy_(found[name])


def _random_state(device: torch.device) -> dict[str, Any]:
    numbers = np.random.get_state(legacy=False)
    key = torch.tensor(numbers["state"]["key"].astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": {**numbers, "state": {**numbers["state"], "key": key}},
    }


def _set_random_state(found: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(found["torch"])
    if device.type == "cuda" and found["cuda"] is not None:
        torch.cuda.set_rng_state(found["cuda"], device)
    random.setstate(found["python"])
    numbers = found["numpy"]
    np.random.set_state({**numbers, "state": {**numbers["state"], "key": numbers["state"]["key"].numpy()}})
