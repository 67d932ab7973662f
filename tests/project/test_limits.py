"""Sentences about what simdist cannot do stand in one table, and none denies a feature that exists."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from scripts import load_script

from simdist.cli import cli
from simdist.scenario import disturbances
from simdist.schedules import kinds
from simdist.settings.base import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GPU_PAGE = load_script(ROOT / "experiments" / "gpu" / "page.py")
TABLE = yaml.safe_load(Path(__file__).with_name("limits.yaml").read_text(encoding="utf-8"))
NOT_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->|^#.*?$", re.S | re.M)
BLOCK = re.compile(r"\n\s*\n|\n(?=[*|])")  # paragraphs, items of lists, rows of tables
SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z`])")
DENIAL = re.compile(
    r"\bnot (?:yet|modelled|simulated|supported|compared|tested|priced|available|implemented|been run)\b|\buntested\b"
    r"|\bnever (?:over|been)\b|\bonly be simulated\b|\bdo(?:es)? not (?:model|simulate|support|resume)\b|\bencrypted\b"
    r"|\bcannot be (?:stated|simulated|performed|modelled|compared|disturbed)\b"
    r"|\bno (?:(?:pipeline|tensor|expert) parallelism|sharded)\b"
    r"|\bno (?:schedules?|plans?|jobs?)\b.* (?:has|have|was|were)\b(?: been)? run\b",
    re.I,
)
SKIPPED = re.compile(
    r'\[[^\]]*\]\([^)]*#not-modelled\)|"[^"]*"|`[^`]*`'
)  # links to the list of limits, quotations, code


def denials(text: str) -> Iterator[str]:
    """Return the sentences of a page that say what simdist does not do; a row of a table is one sentence."""
    for block in BLOCK.split(NOT_PROSE.sub("", text)):
        line = " ".join(block.split())
        for sentence in [line] if line.startswith("|") else SENTENCE.split(line):
            if DENIAL.search(SKIPPED.sub("", sentence)):
                yield sentence


def subclasses(of: type[Settings]) -> Iterator[type[Settings]]:
    for each in of.__subclasses__():
        yield each
        yield from subclasses(each)


def exists(answer) -> bool:
    """Ask the code whether simdist has a feature."""
    if answer is False:
        return False
    ((kind, name),) = answer.items()
    match kind:
        case "schedule":
            return name in kinds()
        case "command":
            return name in cli.list_commands(None)
        case "disturbance":
            classes = [each for each in subclasses(Settings) if each.__module__ == disturbances.__name__]
            return any(
                name in get_args(each.model_fields["kind"].annotation)
                for each in classes
                if "kind" in each.model_fields
            )
        case "key":
            fields = {field for each in subclasses(Settings) for field in each.model_fields}
            return name in fields | {field.rpartition("_")[0] for field in fields}  # a field may end in its unit
        case "measured":  # by this part of the experiment on GPUs
            return GPU_PAGE.newest(name, GPU_PAGE.RESULTS) is not None
        case "recorded":
            return any(ROOT.glob(name))
        case "real":
            return f'"--{name}"' in (ROOT / "real" / "cli.py").read_text(encoding="utf-8")
    raise AssertionError(f"limits.yaml: {kind}")


def wrong(sentence: str) -> str | None:
    """Return what is wrong with a sentence about a limit, if anything."""
    features = [row for row in TABLE if re.search(row["says"], sentence)]
    if not features:
        return f"a new limit, which needs a row in limits.yaml: {sentence}"
    there = [row["feature"] for row in features if exists(row["exists"])]
    return f"denies {', '.join(there)}, which exists: {sentence}" if there else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_denies_does_not_exist(page) -> None:
    found = [wrong(sentence) for sentence in denials(page.read_text(encoding="utf-8"))]
    assert [each for each in found if each] == []


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("Not modelled: sharded models.", "denies sharded models"),
        ("It has no sharded parameters.", "denies sharded models"),
        ("No schedule has been run on GPUs.", "denies schedules on GPUs"),
        ("Teleportation is not supported.", "a new limit"),
        ("Pipeline parallelism is not modelled.", None),
    ],
)
def test_denials_of_what_exists_and_new_limits_are_noticed(sentence, reason) -> None:
    (found,) = denials(f"Some text.\n\n{sentence}")
    assert (wrong(found) or "").startswith(reason or "")
    assert (wrong(found) is None) == (reason is None)


@pytest.mark.parametrize(
    ("answer", "there"),
    [
        ({"schedule": "fsdp"}, True),
        ({"schedule": "pipeline"}, False),
        ({"command": "compare"}, True),
        ({"command": "teleport"}, False),
        ({"disturbance": "transient"}, True),
        ({"disturbance": "failure"}, False),
        ({"key": "gpus_per_node"}, True),
        ({"key": "launches"}, True),
        ({"key": "num_workers"}, True),
        ({"key": "cpu_offload"}, False),
        ({"recorded": "experiments/gpu/results/*.json"}, True),
        ({"measured": "suite"}, True),
        ({"measured": "teleportation"}, False),
        ({"real": "checkpoints"}, True),
        ({"real": "resume"}, False),
    ],
)
def test_the_code_knows_what_exists(answer, there) -> None:
    assert exists(answer) is there
