"""Synthetic samples, made once and kept in memory: no file is read, and there is something to learn in them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Samples = tuple[Tensor, Tensor]
"""Inputs and targets, the samples along the first axis."""

Source = Callable[[int, torch.dtype, torch.Generator], Samples]
"""Makes so many samples of a floating-point type."""

_POOL_NBYTES = 16 * 10**6  # large enough that small models do not learn it by heart, small beside any model on a GPU
_STEP_STRIDE, _RANK_STRIDE = 104_729, 7_919  # primes: windows of different steps and of different ranks differ


def vectors(*shape: int, n_classes: int) -> Source:
    """Return a source of normal noise, brighter by 1 in that one of `n_classes` stretches that is its class."""
    n_numbers = math.prod(shape)

    def make(n_samples: int, dtype: torch.dtype, generator: torch.Generator) -> Samples:
        targets = torch.randint(n_classes, (n_samples,), generator=generator)
        inputs = torch.randn(n_samples, n_numbers, generator=generator)
        inputs += torch.arange(n_numbers) // (n_numbers // n_classes) == targets[:, None]
        return inputs.view(n_samples, *shape).to(dtype), targets

    return make


def texts(length: int, *, n_tokens: int) -> Source:
    """Return a source of token numbers; the next token is one or two above the last, modulo `n_tokens`."""

    def make(n_samples: int, dtype: torch.dtype, generator: torch.Generator) -> Samples:
        first = torch.randint(n_tokens, (n_samples, 1), generator=generator)
        rises = torch.randint(1, 3, (n_samples, length), generator=generator)
        tokens = torch.cat([first, rises], dim=1).cumsum(1) % n_tokens
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return make


def windows(
    source: Source, *, batch_size: int, dtype: torch.dtype, generator: torch.Generator, pin: bool
) -> Callable[[int, int], Samples]:
    """Make a pool of samples; return the function (step, rank) -> batch, a window of it, without a copy.

    The pool is the same on every rank, and the window follows from step and rank alone, so any process can tell the
    batch of any rank. Windows of `batch_size` of at least `2 * batch_size` samples overlap; ranks of one step have
    different ones as long as there are enough, and steps of one rank too.
    """
    sample_nbytes = sum(tensor.nbytes for tensor in source(1, dtype, torch.Generator()))
    n_samples = max(2 * batch_size, _POOL_NBYTES // sample_nbytes)
    pool = source(n_samples, dtype, generator)
    inputs, targets = (tensor.pin_memory() for tensor in pool) if pin else pool
    n_windows = n_samples - batch_size + 1

    def batch(step: int, rank: int) -> Samples:
        first = (step * _STEP_STRIDE + rank * _RANK_STRIDE) % n_windows
        return inputs[first : first + batch_size], targets[first : first + batch_size]

    return batch
