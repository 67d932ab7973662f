"""Run the command line inside the tests, and outside."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import simdist
from simdist.cli import main

SMALL = """\
cluster:
  nodes: 2
  gpus_per_node: 4
  fabric: ideal
  network: {latency: 25 us, bandwidth: 25 Gbit/s}
workload:
  tensors:
    - {name: weight, count: 100000}
    - {name: bias, count: 1000}
  batch_size: 32
  sample_size: 1 kB
  forward: 20 ms
steps: 12
seed: 1
disturbances:
  - {kind: transient, probability: 10%, delay: 50 ms}
schedules:
  - kind: sync
  - {kind: local_sgd, period: 4}
  - {kind: hierarchical_sgd, levels: {2: 4, 4: world}}
"""
LABELS = ["sync", "local-4", "hsgd-2-4,4-world"]
STORAGE = "storage: {latency: 1 ms, bandwidth: 1 GB/s}"


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def call(capsys, *args) -> Answer:
    """Run a command line in this process."""
    capsys.readouterr()
    code = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return Answer(code, out, err)


def write(path: Path, text: str = SMALL) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def edited(*edits: tuple[str, str], text: str = SMALL) -> str:
    """Replace parts of the small scenario, each found exactly once."""
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def process(*args, code: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of `python -m simdist ARGS`, or of `python -c CODE ARGS`."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "simdist"]), *map(str, args)]
    source = str(Path(simdist.__file__).parents[1])
    return command, os.environ | {"PYTHONPATH": source}
