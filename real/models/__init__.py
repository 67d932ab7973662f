"""Models to run plans with: own definitions and synthetic data, without downloads.

The order of `module.parameters()` is the order of first use in the forward pass. It is also the order of rows in the
workload preset of the same name. So tensor i of a plan is parameter i of the module.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from real.models.bert import Bert
from real.models.classifiers import mlp, resnet, vgg
from real.models.gpt import Gpt
from real.programs.optimizers import Lars
from simdist.errors import RunError

_Samples = tuple[Tensor, Tensor]  # inputs and targets, the samples along the first axis

# Makes a number of samples of a floating-point type.
_Source = Callable[[int, torch.dtype, torch.Generator], _Samples]

_POOL_NBYTES = 16 * 10**6  # large enough that small models do not memorise it, small compared with any model on a GPU
# Primes, so that windows of different steps and of different ranks differ.
_STEP_STRIDE = 104_729
_RANK_STRIDE = 7_919


def _vectors(*shape: int, n_classes: int) -> _Source:
    """Return a source of normal noise, brighter by 1 in the one of `n_classes` stretches that is its class."""
    n_numbers = math.prod(shape)

    def make(n_samples: int, dtype: torch.dtype, generator: torch.Generator) -> _Samples:
        targets = torch.randint(n_classes, (n_samples,), generator=generator)
        inputs = torch.randn(n_samples, n_numbers, generator=generator)
        inputs += torch.arange(n_numbers) // (n_numbers // n_classes) == targets[:, None]
        return inputs.view(n_samples, *shape).to(dtype), targets

    return make


def _texts(length: int, *, n_tokens: int) -> _Source:
    """Return a source of token numbers; the next token is one or two above the last, modulo `n_tokens`."""

    def make(n_samples: int, dtype: torch.dtype, generator: torch.Generator) -> _Samples:
        first = torch.randint(n_tokens, (n_samples, 1), generator=generator)
        rises = torch.randint(1, 3, (n_samples, length), generator=generator)
        tokens = torch.cat([first, rises], dim=1).cumsum(1) % n_tokens
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return make


def _documents(length: int, *, n_tokens: int, n_classes: int) -> _Source:
    """Return a source of random token numbers; the class of a text is its first token, modulo `n_classes`."""

    def make(n_samples: int, dtype: torch.dtype, generator: torch.Generator) -> _Samples:
        tokens = torch.randint(n_tokens, (n_samples, length), generator=generator)
        return tokens, tokens[:, 0] % n_classes

    return make


def windows(
    source: _Source, *, batch_size: int, dtype: torch.dtype, generator: torch.Generator, pin: bool
) -> Callable[[int, int], _Samples]:
    """Make a pool of samples; return the function (step, rank) -> batch, a window of it, without a copy.

    The pool is the same on all ranks, and the window follows from step and rank alone. So each process can compute the
    batch of any rank. The pool has at least `2 * batch_size` samples, and windows of `batch_size` overlap. Ranks of one
    step have different windows as long as there are enough, and so do steps of one rank.
    """
    sample_nbytes = sum(tensor.nbytes for tensor in source(1, dtype, torch.Generator()))
    n_samples = max(2 * batch_size, _POOL_NBYTES // sample_nbytes)
    pool = source(n_samples, dtype, generator)
    inputs, targets = (tensor.pin_memory() for tensor in pool) if pin else pool
    n_windows = n_samples - batch_size + 1

    def batch(step: int, rank: int) -> _Samples:
        first = (step * _STEP_STRIDE + rank * _RANK_STRIDE) % n_windows
        return inputs[first : first + batch_size], targets[first : first + batch_size]

    return batch


__all__ = ["TrainingJob", "build_job", "create", "names"]

_LEARNING_RATE = 0.01
_MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Model, loss, optimizer and data of one rank.

    Args:
        module: The module on its device, in its dtype, in training mode.
        loss: (output of the module, targets) -> mean over the batch.
        optimizer: Optimizer of all parameters of `module`.
        batch: (step, rank) -> inputs and targets, views of host memory, pinned if the device is a GPU. With k passes
            per step, pass i of step s counts as step s k + i.
        n_classes: Targets are 0 to n_classes - 1; None if all targets are allowed, so they cannot be checked.
        max_norm: Gradients are clipped to this norm of all of them before each update; None does not clip.
    """

    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    n_classes: int | None = None
    max_norm: float | None = None


def names() -> list[str]:
    """Return the names of models; each is also a workload preset."""
    return sorted(_MODELS)


def create(name: str) -> nn.Module:
    """Return a new module on torch's default device, drawn from torch's default generator.

    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in create("gpt2").parameters())
    124439808

    Raises:
        RunError: There is no such model.
    """
    return _model(name).create()


def build_job(
    name: str, *, batch_size: int, device: torch.device, dtype: torch.dtype, seed: int, lars: bool = False
) -> TrainingJob:
    """Return a model with loss, optimizer (SGD with momentum, or LARS) and data.

    Everything is drawn on the CPU, without changing torch's default generator. So equal seeds give equal parameters and
    batches on all ranks and kinds of devices.

    Args:
        name: One of `names()`.
        batch_size: Samples per rank and step, at least 1.
        device: Device of the module.
        dtype: Data type of parameters and floating-point inputs.
        seed: Seed of parameters and data.
        lars: Update with trust ratios.

    Raises:
        RunError: There is no such model, or the batch is empty.
    """
    model = _model(name)
    if batch_size < 1:
        raise RunError(f"model {name}: batch_size is {batch_size}; must be at least 1")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also set the generators of GPUs
        module = model.create().to(device=device, dtype=dtype)
        batch = windows(
            model.source,
            batch_size=batch_size,
            dtype=dtype,
            generator=torch.Generator().manual_seed(seed),
            pin=device.type == "cuda",
        )
    optimizer = _lars(module) if lars else torch.optim.SGD(module.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
    return TrainingJob(module=module, loss=cross_entropy, optimizer=optimizer, batch=batch, n_classes=model.n_classes)


@dataclass(frozen=True, slots=True)
class _Model:
    create: Callable[[], nn.Module]
    source: _Source
    n_classes: int


def _classifier(create: Callable[[], nn.Module], *shape: int, n_classes: int) -> _Model:
    return _Model(create, _vectors(*shape, n_classes=n_classes), n_classes)


def _of_images(create: Callable[[], nn.Module]) -> _Model:
    return _classifier(create, 3, 224, 224, n_classes=1000)


def _of_texts(create: Callable[..., nn.Module], *, n_tokens: int, length: int) -> _Model:
    return _Model(partial(create, n_tokens=n_tokens, length=length), _texts(length, n_tokens=n_tokens), n_tokens)


_MODELS: Mapping[str, _Model] = {
    "mlp": _classifier(partial(mlp, 784, 256, 256, 10), 784, n_classes=10),
    "resnet18": _of_images(partial(resnet, 2, 2, 2, 2, bottleneck=False)),
    "resnet50": _of_images(partial(resnet, 3, 4, 6, 3, bottleneck=True)),
    "resnet101": _of_images(partial(resnet, 3, 4, 23, 3, bottleneck=True)),
    "resnet152": _of_images(partial(resnet, 3, 8, 36, 3, bottleneck=True)),
    "vgg16": _of_images(partial(vgg, 2, 2, 3, 3, 3)),
    "vgg19": _of_images(partial(vgg, 2, 2, 4, 4, 4)),
    "gpt-nano": _of_texts(partial(Gpt, width=48, n_layers=3, n_heads=3), n_tokens=256, length=128),
    "gpt2": _of_texts(partial(Gpt, width=768, n_layers=12, n_heads=12), n_tokens=50257, length=1024),
    "gpt2-medium": _of_texts(partial(Gpt, width=1024, n_layers=24, n_heads=16), n_tokens=50257, length=1024),
    "bert-large": _Model(  # the pooler's outputs serve as logits, one class each
        partial(Bert, n_tokens=30522, length=512, width=1024, n_layers=24, n_heads=16),
        _documents(512, n_tokens=30522, n_classes=1024),
        1024,
    ),
}


def _model(name: str) -> _Model:
    if name not in _MODELS:
        near = get_close_matches(name, _MODELS, n=1, cutoff=0.0)
        raise RunError(f"no model {name!r}; did you mean {near[0]!r}? There are: {', '.join(names())}")
    return _MODELS[name]


def _lars(module: nn.Module) -> Lars:
    """Return LARS that moves matrices by 1 % of their norm, and vectors at the learning rate of SGD."""
    return Lars(module.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM, eta=1.0)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all predictions; a text has one per token."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
