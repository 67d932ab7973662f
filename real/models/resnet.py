"""Residual networks."""

import torch
from torch import Tensor, nn

from real.models.layers import classifier, conv_bn, named


class Residual(nn.Module):
    """ReLU(body(x) + shortcut(x)); the shortcut is a 1x1 convolution where the shape changes (option B).

    Args:
        n_in: Channels of the input.
        width: Channels inside; the output has four times as many with a bottleneck, else as many.
        stride: Of the block. With a bottleneck it sits in the 3x3 convolution, as everybody trains it ("v1.5").
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
        """Return what has `[batch, channels, height, width]` like the input, but for channels and stride."""
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
            blocks.append(Residual(n_in, 64 << stage, stride, bottleneck=bottleneck))
            n_in = (64 << stage) * (4 if bottleneck else 1)
    return named(layers | {"classifier": classifier(n_in)})
