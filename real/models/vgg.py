"""VGG networks: large linear layers, so few FLOPs per byte of gradient."""

from torch import nn

from real.models.layers import named

_WIDTHS = (64, 128, 256, 512, 512)


def vgg(*depths: int) -> nn.Sequential:
    """Return the network with this many 3x3 convolutions per block, for images `[batch, 3, 224, 224]` of 1000 classes.

    No normalisation, as in the paper; and no dropout, so that equal seeds give equal values on every device.

    Source: Simonyan & Zisserman, arXiv 1409.1556, table 1, columns D (2, 2, 3, 3, 3) and E (2, 2, 4, 4, 4).
    """
    layers: dict[str, nn.Module] = {}
    n_in = 3
    for block, (width, depth) in enumerate(zip(_WIDTHS, depths, strict=True), start=1):
        for i in range(1, depth + 1):
            layers |= {f"conv{block}_{i}": nn.Conv2d(n_in, width, 3, padding=1), f"relu{block}_{i}": nn.ReLU()}
            n_in = width
        layers[f"pool{block}"] = nn.MaxPool2d(2)
    hidden = {"linear1": nn.Linear(512 * 7 * 7, 4096), "relu1": nn.ReLU(), "linear2": nn.Linear(4096, 4096)}
    network = named(
        layers | {"flatten": nn.Flatten()} | hidden | {"relu2": nn.ReLU(), "linear3": nn.Linear(4096, 1000)}
    )
    _initialize(network)
    return network


def _initialize(network: nn.Module) -> None:
    """Keep the variance from layer to layer, without which nothing reaches the end of so deep a network (He init)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
