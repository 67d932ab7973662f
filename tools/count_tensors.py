"""Counts the parameters and forward FLOPs of well-known models, tensor by tensor, into the workload presets.

Usage, from the root of the repository, with torch 2.x installed (no weights, no data, no GPU):

    python tools/count_tensors.py            # rewrite simdist/scenario/presets/workloads/*.csv
    python tools/count_tensors.py --check    # compare with the files that are there; exit 1 on any difference

Each model is written from its paper, in `real.models` if it can be run and else here, and built on torch's `meta`
device, where tensors have shapes but no values. `real.models.counting` notes every parameter in the order in which it
is first used: a row is `name,count,flops,rows`. A backward pass that walks the rows from last to first finishes every
gradient at the right moment.
"""

import argparse
import csv
import io
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from real.models import create  # noqa: E402
from real.models.classifiers import classifier, conv_bn  # noqa: E402
from real.models.counting import count_tensors  # noqa: E402

WORKLOADS = ROOT / "simdist" / "scenario" / "presets" / "workloads"

Row = tuple[str, int, int, int]

# --- models that are counted, but not run ------------------------------------------------------------------------


class Branches(nn.Module):
    """The concatenation, along the channels, of what several modules make of the same input."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def chain(n_in: int, *steps: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """conv_bn after conv_bn at stride 1, each given as (channels, kernel)."""
    widths = [n_in, *(n_out for n_out, _ in steps)]
    return nn.Sequential(*(conv_bn(width, *step) for width, step in zip(widths, steps, strict=False)))


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


# --- counting ----------------------------------------------------------------------------------------------------

IMAGE = (3, 224, 224)
N_SAMPLES = 2  # batch normalisation refuses a single sample of 1x1

# name: model, shape of a sample, expected parameters, published forward multiply-adds (0: none published).
# Sources: the weights metadata of torchvision 0.28 (convolutional networks); the sizes of the published checkpoints
# bert-large-uncased, gpt2 and gpt2-medium. Those of the models of our own follow from their shapes.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, float]] = {
    "resnet18": (partial(create, "resnet18"), IMAGE, 11_689_512, 1.814e9),
    "resnet50": (partial(create, "resnet50"), IMAGE, 25_557_032, 4.089e9),
    "resnet101": (partial(create, "resnet101"), IMAGE, 44_549_160, 7.801e9),
    "resnet152": (partial(create, "resnet152"), IMAGE, 60_192_808, 11.514e9),
    "vgg16": (partial(create, "vgg16"), IMAGE, 138_357_544, 15.47e9),
    "vgg19": (partial(create, "vgg19"), IMAGE, 143_667_240, 19.632e9),
    "inception-v3": (InceptionV3, (3, 299, 299), 27_161_264, 5.713e9),
    "bert-large": (partial(create, "bert-large"), (512,), 335_141_888, 0),
    "gpt2": (partial(create, "gpt2"), (1024,), 124_439_808, 0),
    "gpt2-medium": (partial(create, "gpt2-medium"), (1024,), 354_823_168, 0),
    "gpt-nano": (partial(create, "gpt-nano"), (128,), (256 + 128) * 48 + 3 * (12 * 48**2 + 13 * 48) + 2 * 48, 0),
    "mlp": (partial(create, "mlp"), (784,), 785 * 256 + 257 * 256 + 257 * 10, 0),
}


def rows_of(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> list[Row]:
    """Build a model and a sample (numbers, or of a model with an embedding tokens) without values, and count."""
    with torch.device("meta"):
        model = build()
        reads_tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
        sample = torch.empty(N_SAMPLES, *shape, dtype=torch.long if reads_tokens else torch.float)
        found = count_tensors(model, lambda: model(sample))
    if unused := [each.name for each in found if not each.is_used]:
        raise RuntimeError(f"the forward pass never uses {unused}")
    return [(each.name, each.count, each.flops // N_SAMPLES, each.rows) for each in found]


def verify(name: str, rows: Iterable[Row], n_parameters: int, multiply_adds: float) -> list[str]:
    """Disagreements with the expected totals: parameters exactly, multiply-adds to 1 %."""
    total_count, total_flops = (sum(column) for column in list(zip(*rows, strict=True))[1:3])
    print(f"{name:13} {total_count:>11,} parameters {total_flops / 1e9:8.3f} GFLOP forward")
    wrong = []
    if total_count != n_parameters:
        wrong.append(f"{name}: {total_count:,} parameters, expected are {n_parameters:,}")
    if multiply_adds and abs(total_flops / 2 / multiply_adds - 1) > 0.01:
        wrong.append(f"{name}: {total_flops / 2:.4g} multiply-adds, published are {multiply_adds:.4g}")
    return wrong


def to_csv(rows: Iterable[Row]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("name", "count", "flops", "rows"), *rows])
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
