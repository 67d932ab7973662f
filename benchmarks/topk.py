"""How fast are the ways to top-k, against torch.topk and against one read of the vector?

    python benchmarks/topk.py                     sizes 2^16 to 2^26; exit code 1 if a target is missed
    python benchmarks/topk.py --sizes 28          one size, or several
    python benchmarks/topk.py --device cuda       on the GPU, which is the default where there is one
    python benchmarks/topk.py --quick             a tiny size, to see that it works; a second
    python benchmarks/topk.py --json              the numbers for machines

`torch.topk` gets magnitudes that are ready; the methods compute them. One read is `torch.amax` of the vector. Ratios
compare medians of runs in one process, taken turn by turn; absolute numbers belong to the machine.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from real.kernels.topk import select_largest
from simdist.plan.ops import SelectMethod

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
COLUMNS = ("size", "density", "method", "ms", "times_faster_than_topk", "reads", "recall")


@dataclass(frozen=True)
class Target:
    """Speed-ups that mstopk must reach on a device, at the stated sizes and all densities."""

    device: str
    column: str
    limit: float
    is_at_most: bool
    least_log2_size: int

    def verdict(self, rows: list[dict[str, object]]) -> dict[str, object] | None:
        """Return the worst row's number beside the limit; None if no row is of such a size."""
        found = [
            float(row[self.column])  # type: ignore[arg-type]
            for row in rows
            if row["method"] == "mstopk" and int(row["size"]) >= 2**self.least_log2_size  # type: ignore[call-overload]
        ]
        if not found:
            return None
        reached = max(found) if self.is_at_most else min(found)
        return {
            "what": f"mstopk on {self.device} from 2^{self.least_log2_size} on, {self.column}",
            "target": f"{'<=' if self.is_at_most else '>='} {self.limit:g}",
            "reached": reached,
            "holds": reached <= self.limit if self.is_at_most else reached >= self.limit,
        }


TARGETS = (
    Target("cpu", "times_faster_than_topk", 3.0, is_at_most=False, least_log2_size=24),
    Target("cuda", "times_faster_than_topk", 5.0, is_at_most=False, least_log2_size=26),
    Target("cuda", "reads", 3.0, is_at_most=True, least_log2_size=26),
)


@dataclass(frozen=True)
class Sizes:
    """How much to run."""

    log2_sizes: tuple[int, ...] = (16, 18, 20, 22, 24, 26)
    densities: tuple[float, ...] = (0.001, 0.01)
    repetitions: int = 5


QUICK = Sizes((12,), (0.01,), 2)


def rows(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, object]]:
    """Measure every method at every size and density."""
    for log2_size in sizes.log2_sizes:
        values = torch.randn(2**log2_size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        for density in sizes.densities:
            yield from compared(values, density, sizes.repetitions)


def compared(values: torch.Tensor, density: float, repetitions: int) -> Iterator[dict[str, object]]:
    """Measure all methods, torch.topk and one read, in turns."""
    k = max(1, int(density * values.numel()))
    magnitudes = values.abs()
    runs: dict[str, Callable[[], object]] = {
        "read": lambda: torch.amax(values),
        "topk": lambda: torch.topk(magnitudes, k, sorted=False),
    }
    for method in get_args(SelectMethod):
        runs[method] = lambda method=method: chosen(values, k, method)
    median_s = medians(runs, repetitions, n_calls=max(1, 2**20 // values.numel()), device=values.device)
    kth = torch.topk(magnitudes, k, sorted=False).values.min()
    for method in get_args(SelectMethod):
        yield {
            "size": values.numel(),
            "density": density,
            "method": method,
            "ms": median_s[method] * 1e3,
            "times_faster_than_topk": median_s["topk"] / median_s[method],
            "reads": median_s[method] / median_s["read"],
            "recall": float((chosen(values, k, method).abs() >= kth).double().mean()),
        }


def chosen(values: torch.Tensor, k: int, method: SelectMethod) -> torch.Tensor:
    """Return the selected values, by this project's kernels, of the same random stretch or sample each time."""
    return select_largest(values, k, method, generator=torch.Generator().manual_seed(1), kernels_from=0)[0]


def medians(
    runs: dict[str, Callable[[], object]], repetitions: int, *, n_calls: int, device: torch.device
) -> dict[str, float]:
    """Return the median seconds per call of each, after a first call that is not counted.

    A GPU works off what the host enqueues, so calls follow each other there as they would in a program.
    """
    if device.type == "cuda":
        n_calls = max(n_calls, 10)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 1):
        for name, run in runs.items():
            finish(device)
            began_s = time.perf_counter()
            for _ in range(n_calls):
                run()
            finish(device)
            if repetition:
                seconds[name].append((time.perf_counter() - began_s) / n_calls)
    return {name: statistics.median(each) for name, each in seconds.items()}


def finish(device: torch.device) -> None:
    """Wait for what the GPU has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def shown(value: object) -> str:
    """Return a number in a few digits, and a size as a power of two."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"2^{value.bit_length() - 1}"
    return f"{value:.5f}" if 0.9 < value < 1 else f"{value:.3g}"


def table(title: str, columns: tuple[str, ...], found: list[dict[str, object]]) -> str:
    """Return rows as aligned text."""
    lines = [columns, *(tuple(shown(row[column]) for column in columns) for row in found)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([title, *text, ""])


def main() -> int:
    """Run everything and print it; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", default=1, type=int, help="of the CPU; torch.topk of a vector uses one at most")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--sizes", nargs="+", type=int, metavar="LOG2", help="exponents of 2")
    parser.add_argument("--densities", nargs="+", type=float, metavar="SHARE")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    options = parser.parse_args()
    default = QUICK if options.quick else Sizes()
    sizes = Sizes(
        tuple(options.sizes or default.log2_sizes), tuple(options.densities or default.densities), default.repetitions
    )
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    found = list(rows(sizes, device, DTYPES[options.dtype]))
    verdicts = [target.verdict(found) for target in TARGETS if target.device == device.type]
    targets = [verdict for verdict in verdicts if verdict is not None]
    missed = not all(target["holds"] for target in targets)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {options.threads}"
    if options.json:
        about = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": name,
            "dtype": options.dtype,
        }
        print(json.dumps({**about, "sizes": asdict(sizes), "rows": found, "targets": targets}, indent=1))
        return int(missed)
    print(table(f"top-k of normal {options.dtype} on {name}", COLUMNS, found))
    if targets:
        print(table("targets", ("what", "target", "reached", "holds"), targets))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
