"""A multilayer perceptron, for tests and for clusters without GPUs."""

from itertools import pairwise

from torch import nn

from real.models.layers import named


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers from width to width with ReLU between them, for inputs `[batch, widths[0]]`.

    >>> import torch
    >>> mlp(784, 256, 10)(torch.zeros(2, 784)).shape
    torch.Size([2, 10])
    """
    layers: dict[str, nn.Module] = {}
    for i, (n_in, n_out) in enumerate(pairwise(widths), start=1):
        if i > 1:
            layers[f"relu{i - 1}"] = nn.ReLU()
        layers[f"linear{i}"] = nn.Linear(n_in, n_out)
    return named(layers)
