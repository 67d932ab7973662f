"""Building blocks that several models share."""

from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional


class MatrixProduct(nn.Module):
    """A @ B without parameters: a module only so that a hook sees it."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product."""
        return a @ b


class ScaledDotProduct(nn.Module):
    """softmax(Q K^T / sqrt(width)) V, without parameters: a module only so that a hook sees it.

    Args:
        causal: A position sees only itself and those before it.
    """

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the mixed values; all shapes are `[batch, heads, positions, width]`."""
        return functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)


def named(modules: Mapping[str, nn.Module]) -> nn.Sequential:
    """Put one module after the other, under names that show in the names of their parameters."""
    return nn.Sequential(OrderedDict(modules))


def conv_bn(
    n_in: int, n_out: int, kernel: int | tuple[int, int], *, stride: int = 1, pad: bool = True
) -> nn.Sequential:
    """Return convolution without bias, batch normalisation, ReLU; `pad` keeps the size at stride 1."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, width // 2) if pad else 0
    conv = nn.Conv2d(n_in, n_out, (height, width), stride=stride, padding=padding, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return named({"conv": conv, "norm": nn.BatchNorm2d(n_out), "relu": nn.ReLU()})


def classifier(n_in: int, n_classes: int = 1000) -> nn.Sequential:
    """Return global average pooling and one linear layer."""
    return named({"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "linear": nn.Linear(n_in, n_classes)})
