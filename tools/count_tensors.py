"""Counts the parameters and forward FLOPs of well-known models, tensor by tensor, into the workload presets.

Usage, from the root of the repository, with torch 2.x installed (nothing else; no weights, no data, no GPU):

    python tools/count_tensors.py            # rewrite simdist/scenario/presets/workloads/*.csv
    python tools/count_tensors.py --check    # compare with the files that are there; exit 1 on any difference

Each model is written here from its paper and built on torch's `meta` device, where tensors have shapes but no values.
One sample runs forward, and hooks note every parameter in the order in which it is first used: a row is
`name,count,flops`. The rules, chosen so that a backward pass which walks the rows from last to first finishes every
gradient at the right moment:

* `flops` is 2 x the multiply-adds of the convolution or matrix product that uses the weight, for one sample.
* Biases, normalisations, embeddings, activations and pooling count 0: they cost memory traffic, not arithmetic.
* A product without a weight of its own (attention scores, attention times values, logits of a tied embedding) is
  booked on the tensor used just before it, because backward does it just before that tensor's gradient.
* A tied weight is one row, at its first use: its gradient is complete only when backward gets there.
"""

import argparse
import csv
import io
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

WORKLOADS = Path(__file__).resolve().parents[1] / "simdist" / "scenario" / "presets" / "workloads"

Row = tuple[str, int, int]

# --- building blocks ---------------------------------------------------------------------------------------------


class MatrixProduct(nn.Module):
    """A @ B without parameters: a module only so that a hook sees it."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class Branches(nn.Module):
    """The concatenation, along the channels, of what several modules make of the same input."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def named(modules: Mapping[str, nn.Module]) -> nn.Sequential:
    """One module after the other, under names that show in the names of their parameters."""
    return nn.Sequential(OrderedDict(modules))


def conv_bn(
    n_in: int, n_out: int, kernel: int | tuple[int, int], *, stride: int = 1, pad: bool = True
) -> nn.Sequential:
    """Convolution without bias, batch normalisation, ReLU; `pad` keeps the size at stride 1."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, width // 2) if pad else 0
    conv = nn.Conv2d(n_in, n_out, (height, width), stride=stride, padding=padding, bias=False)
    return named({"conv": conv, "norm": nn.BatchNorm2d(n_out), "relu": nn.ReLU()})


def chain(n_in: int, *steps: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """conv_bn after conv_bn at stride 1, each given as (channels, kernel)."""
    widths = [n_in, *(n_out for n_out, _ in steps)]
    return nn.Sequential(*(conv_bn(width, *step) for width, step in zip(widths, steps, strict=False)))


def classifier(n_in: int, n_classes: int = 1000) -> nn.Sequential:
    """Global average pooling and one linear layer."""
    return named({"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "linear": nn.Linear(n_in, n_classes)})


# --- convolutional networks --------------------------------------------------------------------------------------


class Residual(nn.Module):
    """ReLU(body(x) + shortcut(x)); the shortcut is a 1x1 convolution where the shape changes (option B)."""

    def __init__(self, n_in: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:  # the stride sits in the 3x3 convolution, as everybody trains it ("v1.5")
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
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(*depths: int, bottleneck: bool) -> nn.Sequential:
    """He et al., arXiv 1512.03385, table 1."""
    layers: dict[str, nn.Module] = {"stem": conv_bn(3, 64, 7, stride=2), "pool": nn.MaxPool2d(3, 2, padding=1)}
    n_in = 64
    for stage, depth in enumerate(depths):
        blocks = layers[f"stage{stage + 1}"] = nn.Sequential()
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            blocks.append(Residual(n_in, 64 << stage, stride, bottleneck=bottleneck))
            n_in = (64 << stage) * (4 if bottleneck else 1)
    return named(layers | {"classifier": classifier(n_in)})


def vgg(*depths: int) -> nn.Sequential:
    """Simonyan & Zisserman, arXiv 1409.1556, table 1, columns D and E: 3x3 convolutions with bias, no normalisation."""
    layers: dict[str, nn.Module] = {}
    n_in = 3
    for block, (width, depth) in enumerate(zip((64, 128, 256, 512, 512), depths, strict=True), start=1):
        for i in range(1, depth + 1):
            layers |= {f"conv{block}_{i}": nn.Conv2d(n_in, width, 3, padding=1), f"relu{block}_{i}": nn.ReLU()}
            n_in = width
        layers[f"pool{block}"] = nn.MaxPool2d(2)
    hidden = {"linear1": nn.Linear(512 * 7 * 7, 4096), "relu1": nn.ReLU(), "linear2": nn.Linear(4096, 4096)}
    return named(layers | {"flatten": nn.Flatten()} | hidden | {"relu2": nn.ReLU(), "linear3": nn.Linear(4096, 1000)})


class InceptionV3(nn.Module):
    """Szegedy et al., arXiv 1512.00567, with the auxiliary classifier that is trained along with it."""

    def __init__(self) -> None:
        super().__init__()
        valid = partial(conv_bn, pad=False)
        shrink = nn.MaxPool2d(3, 2)
        first = (valid(3, 32, 3, stride=2), valid(32, 32, 3), conv_bn(32, 64, 3), shrink)
        self.stem = nn.Sequential(*first, conv_bn(64, 80, 1), valid(80, 192, 3), shrink)
        self.grid35 = nn.Sequential(*(self._grid35(n_in, pool) for n_in, pool in ((192, 32), (256, 64), (288, 64))))
        self.to17 = Branches(
            valid(288, 384, 3, stride=2),
            nn.Sequential(chain(288, (64, 1), (96, 3)), valid(96, 96, 3, stride=2)),
            shrink,
        )
        self.grid17 = nn.Sequential(*(self._grid17(width) for width in (128, 160, 160, 192)))
        self.auxiliary = nn.Sequential(nn.AvgPool2d(5, 3), conv_bn(768, 128, 1), valid(128, 768, 5), classifier(768))
        self.to8 = Branches(
            nn.Sequential(conv_bn(768, 192, 1), valid(192, 320, 3, stride=2)),
            nn.Sequential(chain(768, (192, 1), (192, (1, 7)), (192, (7, 1))), valid(192, 192, 3, stride=2)),
            shrink,
        )
        self.grid8 = nn.Sequential(self._grid8(1280), self._grid8(2048))
        self.classifier = classifier(2048)

    @staticmethod
    def _pooled(n_in: int, n_out: int) -> nn.Sequential:
        return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), conv_bn(n_in, n_out, 1))

    @classmethod
    def _grid35(cls, n_in: int, pool: int) -> Branches:
        double = chain(n_in, (64, 1), (96, 3), (96, 3))
        return Branches(conv_bn(n_in, 64, 1), chain(n_in, (48, 1), (64, 5)), double, cls._pooled(n_in, pool))

    @classmethod
    def _grid17(cls, width: int) -> Branches:
        single = chain(768, (width, 1), (width, (1, 7)), (192, (7, 1)))
        double = chain(768, (width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7)))
        return Branches(conv_bn(768, 192, 1), single, double, cls._pooled(768, 192))

    @classmethod
    def _grid8(cls, n_in: int) -> Branches:
        single, double = conv_bn(n_in, 384, 1), chain(n_in, (448, 1), (384, 3))
        forked = (
            nn.Sequential(stem, Branches(conv_bn(384, 384, (1, 3)), conv_bn(384, 384, (3, 1))))
            for stem in (single, double)
        )
        return Branches(conv_bn(n_in, 320, 1), *forked, cls._pooled(n_in, 192))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.grid17(self.to17(self.grid35(self.stem(x))))
        auxiliary = self.auxiliary(x)
        return self.classifier(self.grid8(self.to8(x))), auxiliary


# --- transformers ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head self-attention; a causal mask would not change what is computed, so there is none."""

    def __init__(self, width: int, n_heads: int, *, fused: bool) -> None:
        super().__init__()
        self.n_heads = n_heads
        names = {"qkv": 3 * width} if fused else {"query": width, "key": width, "value": width}
        self.project = nn.ModuleDict({name: nn.Linear(width, n_out) for name, n_out in names.items()})
        self.score, self.mix = MatrixProduct(), MatrixProduct()
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = torch.cat([linear(x) for linear in self.project.values()], dim=-1)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        mixed = self.mix(self.score(q, k.transpose(2, 3)).softmax(-1), v)
        return self.output(mixed.transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    """Attention and a feed-forward network of 4 x width; normalised before (GPT-2) or after (BERT) each."""

    def __init__(self, width: int, n_heads: int, *, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = Attention(width, n_heads, fused=norm_first)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.feed_forward_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in ((self.attention_norm, self.attention), (self.feed_forward_norm, self.feed_forward)):
            x = x + part(norm(x)) if self.norm_first else norm(x + part(x))
        return x


class BertLarge(nn.Module):
    """Devlin et al., arXiv 1810.04805: the encoder with pooler of BERT-large, uncased; no pre-training heads."""

    def __init__(self, width: int = 1024, n_layers: int = 24, n_heads: int = 16) -> None:
        super().__init__()
        self.token, self.position, self.segment = (nn.Embedding(rows, width) for rows in (30522, 512, 2))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(TransformerLayer(width, n_heads, norm_first=False) for _ in range(n_layers)))
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(tokens) + self.segment(tokens)  # shapes alone matter here
        return self.pooler(self.layers(self.norm(x))[:, 0])


class Gpt2(nn.Module):
    """Radford et al. 2019: GPT-2 small with its language-model head, which is the token embedding again (tied)."""

    def __init__(self, width: int = 768, n_layers: int = 12, n_heads: int = 12) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(50257, width), nn.Embedding(1024, width)
        self.layers = nn.Sequential(*(TransformerLayer(width, n_heads, norm_first=True) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = MatrixProduct()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.layers(self.token(tokens) + self.position(tokens)))
        return self.logits(x, self.token.weight.T)


# --- counting ----------------------------------------------------------------------------------------------------


def flops(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> int:
    """2 x multiply-adds of one call of `module`, 0 if it is neither a convolution nor a matrix product."""
    match module:
        case nn.Conv2d():
            return 2 * output.numel() * module.weight[0].numel()
        case nn.Linear():
            return 2 * output.numel() * module.in_features
        case MatrixProduct():
            return 2 * output.numel() * inputs[0].shape[-1]
        case _:
            return 0


def count_tensors(model: nn.Module, sample: Tensor) -> list[Row]:
    """(name, elements, forward FLOPs per sample) of every parameter, in the order of first use."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    counts: dict[str, int] = {}
    spent: dict[str, int] = {}

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        owned = [(names[id(parameter)], parameter) for parameter in module.parameters(recurse=False)]
        for name, parameter in owned:
            counts[name], spent[name] = parameter.numel(), 0
        target = owned[0][0] if owned else next(reversed(counts))
        spent[target] += flops(module, inputs, output)

    for module in model.modules():
        if not list(module.children()) and (
            list(module.parameters(recurse=False)) or isinstance(module, MatrixProduct)
        ):
            module.register_forward_hook(record)
    model.eval()(sample)  # in training mode batch normalisation refuses a single 1x1 sample; the products are the same
    unused = set(names.values()) - set(counts)
    if unused:
        raise RuntimeError(f"the forward pass never uses {sorted(unused)}")
    return [(name, counts[name], spent[name]) for name in counts]


# name: model, shape of a sample, published parameters, published forward multiply-adds (0: none published).
# Sources: the weights metadata of torchvision 0.28 (convolutional networks); 335,141,888 and 124,439,808 are the sizes
# of the published checkpoints bert-large-uncased and gpt2.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, float]] = {
    "resnet18": (partial(resnet, 2, 2, 2, 2, bottleneck=False), (3, 224, 224), 11_689_512, 1.814e9),
    "resnet50": (partial(resnet, 3, 4, 6, 3, bottleneck=True), (3, 224, 224), 25_557_032, 4.089e9),
    "resnet101": (partial(resnet, 3, 4, 23, 3, bottleneck=True), (3, 224, 224), 44_549_160, 7.801e9),
    "resnet152": (partial(resnet, 3, 8, 36, 3, bottleneck=True), (3, 224, 224), 60_192_808, 11.514e9),
    "vgg16": (partial(vgg, 2, 2, 3, 3, 3), (3, 224, 224), 138_357_544, 15.47e9),
    "vgg19": (partial(vgg, 2, 2, 4, 4, 4), (3, 224, 224), 143_667_240, 19.632e9),
    "inception-v3": (InceptionV3, (3, 299, 299), 27_161_264, 5.713e9),
    "bert-large": (BertLarge, (512,), 335_141_888, 0),
    "gpt2": (Gpt2, (1024,), 124_439_808, 0),
}


def rows_of(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> list[Row]:
    """Build a model and a sample (pixels or token numbers) without values, and count."""
    with torch.device("meta"):
        return count_tensors(build(), torch.empty(1, *shape, dtype=torch.float if len(shape) == 3 else torch.long))


def verify(name: str, rows: Iterable[Row], n_parameters: int, multiply_adds: float) -> list[str]:
    """What disagrees with the published totals: parameters exactly, multiply-adds to 1 %."""
    total_count, total_flops = (sum(column) for column in list(zip(*rows, strict=True))[1:])
    print(f"{name:13} {total_count:>11,} parameters {total_flops / 1e9:8.3f} GFLOP forward")
    wrong = []
    if total_count != n_parameters:
        wrong.append(f"{name}: {total_count:,} parameters, published are {n_parameters:,}")
    if multiply_adds and abs(total_flops / 2 / multiply_adds - 1) > 0.01:
        wrong.append(f"{name}: {total_flops / 2:.4g} multiply-adds, published are {multiply_adds:.4g}")
    return wrong


def to_csv(rows: Iterable[Row]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("name", "count", "flops"), *rows])
    return text.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the shipped files instead of writing them")
    check = parser.parse_args().check
    wrong: list[str] = []
    for name, (build, shape, n_parameters, multiply_adds) in MODELS.items():
        rows = rows_of(build, shape)
        wrong += verify(name, rows, n_parameters, multiply_adds)
        path = WORKLOADS / f"{name}.csv"
        if not check:
            path.write_text(to_csv(rows))
        elif not path.exists() or path.read_text() != to_csv(rows):
            wrong.append(f"{path}: differs from what this script counts; run it without --check to rewrite the file")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
