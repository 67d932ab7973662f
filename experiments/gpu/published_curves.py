"""Published times by batch size: two sizes of a curve predict the others, as for the curves measured here.

Forward passes of plain PyTorch on one GPU, NVIDIA's container 21.03 (of ResNeXt-101 20.06). A pass takes
batch_size / images_per_s.

Source of `images_per_s`: "Throughput Avg" of "Inference performance" in PyTorch/Classification/ConvNets/*/README.md
of github.com/NVIDIA/DeepLearningExamples at 729963d. Batches that the source leaves out are absent.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

FILE = Path(__file__).with_name("published.csv")
_COLUMNS = ("model", "gpu", "precision", "batch_size", "images_per_s", "two_sizes_ms")
_MISS = 0.10  # of the time of a pass
# A pass has one parameter: what is predicted does not depend on the model, only on the measured times.
_WORKLOAD = {"tensors": [{"name": "all", "count": 1}]}


@dataclass(frozen=True, slots=True)
class Published:
    """A published rate, and what today's model says of it.

    Args:
        model: As the source names it.
        gpu: The GPU.
        precision: Of the arithmetic; fp16 is mixed.
        batch_size: Images of a pass.
        images_per_s: The rate.
        two_sizes_ms: Predicted milliseconds of a pass; None if its size is given.
    """

    model: str
    gpu: str
    precision: str
    batch_size: int
    images_per_s: float
    two_sizes_ms: float | None

    @property
    def pass_ms(self) -> float:
        """Milliseconds of a pass."""
        return 1e3 * self.batch_size / self.images_per_s

    @property
    def error(self) -> float | None:
        """Error of the prediction."""
        return None if self.two_sizes_ms is None else self.two_sizes_ms / self.pass_ms - 1


def read(file: Path = FILE) -> list[Published]:
    """Read the rows of a file."""
    with file.open(encoding="utf-8", newline="") as opened:
        return [
            Published(
                row["model"],
                row["gpu"],
                row["precision"],
                int(row["batch_size"]),
                float(row["images_per_s"]),
                float(row["two_sizes_ms"]) if row["two_sizes_ms"] else None,
            )
            for row in csv.DictReader(opened)
        ]


def predict_again(file: Path = FILE) -> int:
    """Predict all rows of a file with today's model, and write them; return how many were predicted."""
    import steps  # of this folder

    curves: dict[tuple[str, str, str], list[Published]] = {}
    for row in read(file):
        curves.setdefault((row.model, row.gpu, row.precision), []).append(row)
    n_predicted = 0
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for curve in curves.values():
            predicted_ms = steps.by_two_sizes({row.batch_size: row.pass_ms / 1e3 for row in curve}, _WORKLOAD)
            for row in curve:
                found_ms = predicted_ms.get(row.batch_size)
                n_predicted += found_ms is not None
                about = (row.model, row.gpu, row.precision, row.batch_size, f"{row.images_per_s:g}")
                writer.writerow((*about, "" if found_ms is None else f"{found_ms:.6g}"))
    return n_predicted


def summary(rows: Sequence[Published]) -> Mapping[str, tuple[int, int, float, float, float]]:
    """Return by GPU and for all: curves, predicted passes, median and worst error, and the share within 10 %."""
    groups = {gpu: [row for row in rows if row.gpu == gpu] for gpu in dict.fromkeys(row.gpu for row in rows)}
    return {name: _summed(some) for name, some in (groups | {"all": rows}).items()}


def _summed(rows: Sequence[Published]) -> tuple[int, int, float, float, float]:
    errors = [row.error for row in rows if row.error is not None]
    n_curves = len({(row.model, row.gpu, row.precision) for row in rows})
    worst = max(errors, key=abs)
    within = sum(abs(error) <= _MISS for error in errors) / len(errors)
    return n_curves, len(errors), median(map(abs, errors)), worst, within
