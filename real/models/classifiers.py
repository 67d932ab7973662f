"""Classifiers: a multilayer perceptron (for tests, and for clusters without GPUs), VGG and residual networks."""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn


def named_layers(modules: Mapping[str, nn.Module]) -> nn.Sequential:
    """Chain modules, under names that appear in the names of their parameters."""
    return nn.Sequential(OrderedDict(modules))


def conv_bn(
    n_in: int, n_out: int, kernel: int | tuple[int, int], *, stride: int = 1, pad: bool = True
) -> nn.Sequential:
    """Return convolution without bias, batch normalisation, ReLU; `pad` keeps the size at stride 1."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, width // 2) if pad else 0
    conv = nn.Conv2d(n_in, n_out, (height, width), stride=stride, padding=padding, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return named_layers({"conv": conv, "norm": nn.BatchNorm2d(n_out), "relu": nn.ReLU()})


def classifier(n_in: int, n_classes: int = 1000) -> nn.Sequential:
    """Return global average pooling and one linear layer."""
    return named_layers(
        {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "linear": nn.Linear(n_in, n_classes)}
    )


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
    return named_layers(layers)


_VGG_WIDTHS = (64, 128, 256, 512, 512)


def vgg(*depths: int) -> nn.Sequential:
    """Return the network with this many 3x3 convolutions per block, for images `[batch, 3, 224, 224]` of 1000 classes.

    There is no normalisation, as in the paper, and no dropout, so that equal seeds give equal values on all devices.

    Source: Simonyan & Zisserman, arXiv 1409.1556, table 1, columns D (2, 2, 3, 3, 3) and E (2, 2, 4, 4, 4).
    """
    layers: dict[str, nn.Module] = {}
    n_in = 3
    for block, (width, depth) in enumerate(zip(_VGG_WIDTHS, depths, strict=True), start=1):
        for i in range(1, depth + 1):
            layers |= {f"conv{block}_{i}": nn.Conv2d(n_in, width, 3, padding=1), f"relu{block}_{i}": nn.ReLU()}
            n_in = width
        layers[f"pool{block}"] = nn.MaxPool2d(2)
    hidden = {"linear1": nn.Linear(512 * 7 * 7, 4096), "relu1": nn.ReLU(), "linear2": nn.Linear(4096, 4096)}
    network = named_layers(
        layers | {"flatten": nn.Flatten()} | hidden | {"relu2": nn.ReLU(), "linear3": nn.Linear(4096, 1000)}
    )
    _initialize(network)
    return network


def _initialize(network: nn.Module) -> None:
    """Keep the variance from layer to layer (He init); otherwise no signal reaches the end of a deep network."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class _Residual(nn.Module):
    """ReLU(body(x) + shortcut(x)); the shortcut is a 1x1 convolution if the shape changes (option B).

    Args:
        n_in: Channels of the input.
        width: Channels inside; the output has four times as many with a bottleneck, else as many.
        stride: Stride of the block. With a bottleneck, the 3x3 convolution has it, as usual in training ("v1.5").
        bottleneck: 1x1, 3x3, 1x1 instead of 3x3, 3x3.
    """

    def __init__(self, n_in: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            n_out = 4 * width
            self.body = nn.Sequential(
                conv_bn(n_in, width, 1), conv_bn(width, width, 3, stride=stride), conv_bn(width, n_out, 1)[:2]
            )
        else:
            n_out = width
            self.body = nn.Sequential(conv_bn(n_in, width, 3, stride=stride), conv_bn(width, n_out, 3)[:2])
        changes = stride != 1 or n_in != n_out
        self.shortcut = conv_bn(n_in, n_out, 1, stride=stride)[:2] if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor `[batch, channels, height, width]` like the input, except for channels and stride."""
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(*depths: int, bottleneck: bool) -> nn.Sequential:
    """Return the network with this many blocks per stage, for images `[batch, 3, height, width]` of 1000 classes.

    Source: He et al., arXiv 1512.03385, table 1.
    """
    layers: dict[str, nn.Module] = {"stem": conv_bn(3, 64, 7, stride=2), "pool": nn.MaxPool2d(3, 2, padding=1)}
    n_in = 64
    for stage, depth in enumerate(depths):
        blocks = layers[f"stage{stage + 1}"] = nn.Sequential()
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            blocks.append(_Residual(n_in, 64 << stage, stride, bottleneck=bottleneck))
            n_in = (64 << stage) * (4 if bottleneck else 1)
    return named_layers(layers | {"classifier": classifier(n_in)})
