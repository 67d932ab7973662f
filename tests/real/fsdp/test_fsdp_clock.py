"""`fully_shard` on a virtual clock: timelines worked by hand, closed forms, and the rules that its code follows."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
from fsdp_checked import unless_checked
from fsdp_ranks import late_jobs, random_lateness, rows_of_ranks
from fsdp_rules import rows_by_rules
from fsdp_settings import (
    ALL_REDUCE,
    BACKWARD,
    BACKWARD_GATHER,
    FORWARD,
    GATHER,
    OPTIMIZE,
    REDUCE_SCATTER,
    ROOT,
    MicroBatch,
    OneRank,
    Passes,
    Root,
    Row,
    Settings,
    Unit,
    random_settings,
)

if torch.__version__ < "2.13":
    pytest.skip("fully_shard is driven by names that it has from torch 2.13 on", allow_module_level=True)

from fsdp_clock import drive

pytestmark = unless_checked()
NAMES = {
    FORWARD: "F",
    BACKWARD: "B",
    GATHER: "AG",
    BACKWARD_GATHER: "AG'",
    REDUCE_SCATTER: "RS",
    ALL_REDUCE: "AR",
    OPTIMIZE: "OPT",
}
COMPUTE_BOUND = """
    AG0 0-2, F0 2-6, AG1 2-4, F1 6-10, AG2 4-6, F2 10-14,
    AG'2 10-12, AG'1 14-16, B2 14-22, RS2 22-25, AG'0 25-27, B1 22-30, RS1 30-33, B0 30-38, RS0 38-41, OPT 41-42
"""
GATHER_BOUND = """
    AG0 0-5, F0 5-7, AG1 5-10, F1 10-12, AG2 10-15, F2 15-17,
    AG'2 15-20, AG'1 20-25, B2 20-28, RS2 28-31, AG'0 31-36, B1 28-36, RS1 36-39, B0 36-44, RS0 44-47, OPT 47-48
"""
EXPOSED_ALL_REDUCE = """
    AG0 0-1, F0 1-4, AG1 1-2, F1 4-7, AG2 2-3, F2 7-10,
    AG'2 7-8, AG'1 10-11, B2 10-15, RS2 15-17, AR2 17-24, AG'0 17-18, B1 15-20, RS1 20-22, AR1 24-31, B0 20-25,
    RS0 25-27, AR0 31-38, OPT 38-39
"""
by_torch_and_by_rules = pytest.mark.parametrize("rows_of", [drive, rows_by_rules])
RowsOf = Callable[[Settings], list[Row]]


def equal_units(
    n: int, f: int, b: int, g: int, r: int, a: int = 0, o: int = 1, regather: int | None = None
) -> tuple[Unit, ...]:
    """Return equal units; the first takes the time of the optimizer."""
    unit = Unit(forward=f, backward=b, gather=g, reduce_scatter=r, all_reduce=a, regather=regather)
    return (replace(unit, optimize=o), *[unit] * (n - 1))


def shown(rows: list[Row]) -> list[str]:
    """Return what takes time, as the timelines name it."""
    texts = []
    for row in rows:
        unit = "" if row.kind == OPTIMIZE else "root" if row.unit == ROOT else str(row.unit)
        if row.end > row.start:
            texts.append(f"{NAMES[row.kind]}{unit} {row.start}-{row.end}")
    return texts


def entries(timeline: str) -> list[str]:
    return [entry.strip() for entry in timeline.split(",")]


def step_time(rows: list[Row]) -> int:
    return max(row.end for row in rows)


@by_torch_and_by_rules
@pytest.mark.parametrize(
    ("settings", "timeline"),
    [
        (Settings(equal_units(3, f=4, b=8, g=2, r=3)), COMPUTE_BOUND),
        (Settings(equal_units(3, f=2, b=8, g=5, r=3)), GATHER_BOUND),
        (Settings(equal_units(3, f=3, b=5, g=1, r=2, a=7), replicas=2), EXPOSED_ALL_REDUCE),
    ],
    ids=["compute-bound", "bound by gathers", "exposed all-reduce"],
)
def test_timelines_worked_by_hand(rows_of: RowsOf, settings: Settings, timeline: str) -> None:
    assert shown(rows_of(settings)) == entries(timeline)


@dataclass(frozen=True)
class Form:
    """A closed form of a step's time, of n units with times f, b, g, r, a, o and k micro-batches, and when it holds."""

    time: Callable[..., int]
    holds: Callable[..., bool]
    settings: Mapping[str, object] = field(default_factory=dict)
    earlier: MicroBatch = field(default_factory=MicroBatch)


def _is_compute_bound(f: int, b: int, g: int, r: int, **_: int) -> bool:
    return g <= f and r + g <= b


def _exposed_all_reduces(n: int, f: int, b: int, g: int, r: int, a: int, **_: int) -> int:
    return g + n * f + b + r + n * a


HSDP = {"replicas": 2}
FORMS = {
    "compute-bound": Form(
        lambda n, f, b, g, r, o, **_: g + n * (f + b) + r + o,
        lambda a, k, **of: k == 1 and _is_compute_bound(**of),
    ),
    "forward bound by gathers": Form(
        lambda n, f, b, g, r, o, **_: (n + 1) * g + n * b + r + o,
        lambda f, b, g, r, k, **_: k == 1 and g >= f and r + g <= b,
    ),
    "bound by one communicator": Form(
        lambda n, b, g, r, o, **_: (n + 1) * g + max(b, g) + (n - 2) * (g + r) + max(b, r) + r + o,
        lambda f, b, g, r, k, **_: k == 1 and g >= f and r + g >= b,
    ),
    "sum of the wire times": Form(
        lambda n, g, r, o, **_: 2 * n * g + n * r + o,
        lambda f, b, g, r, k, **_: k == 1 and g >= f and b <= g and b <= r,
    ),
    "exposed all-reduces": Form(
        lambda o, k, **of: k * _exposed_all_reduces(**of) + o,
        lambda a, b, **of: a >= b and _is_compute_bound(b=b, **of),
        HSDP,
    ),
    "hidden all-reduces": Form(
        lambda n, f, b, g, r, a, o, **_: g + n * (f + b) + r + a + o,
        lambda a, b, k, **of: k == 1 and a < b and _is_compute_bound(b=b, **of),
        HSDP,
    ),
    "all-reduces in the last micro-batch": Form(
        lambda o, k, **of: (
            (k - 1) * (of["g"] + of["n"] * (of["f"] + of["b"]) + of["r"]) + _exposed_all_reduces(**of) + o
        ),
        lambda a, b, **of: a >= b and _is_compute_bound(b=b, **of),
        HSDP,
        MicroBatch(all_reduces=False),
    ),
    "no reduction before the last micro-batch": Form(
        lambda o, k, **of: (k - 1) * (of["g"] + of["n"] * (of["f"] + of["b"])) + _exposed_all_reduces(**of) + o,
        lambda a, b, **of: a >= b and _is_compute_bound(b=b, **of),
        HSDP,
        MicroBatch(reduces=False),
    ),
    "two communicators, bound by reduce-scatters": Form(
        lambda n, f, b, g, r, o, **_: g + n * f + b + n * r + o,
        lambda f, b, g, r, k, **_: k == 1 and g <= f and g <= b and r >= b,
        {"separate_group": True},
    ),
    "kept after the forward pass, bound by reduce-scatters": Form(
        lambda n, f, b, g, r, o, **_: g + n * f + b + n * r + o,
        lambda f, b, g, r, k, **_: k == 1 and g <= f and r >= b,
        {"reshard_after_forward": False},
    ),
    "serial": Form(
        lambda n, f, b, g, r, o, k, **_: k * n * (f + b + 2 * g + r) + o,
        lambda **_: True,
        {"serial": True},
    ),
    "serial and kept": Form(
        lambda n, f, b, g, r, o, k, **_: k * n * (f + b + g + r) + o,
        lambda **_: True,
        {"serial": True, "reshard_after_forward": False},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_closed_forms_of_equal_units(name: str) -> None:
    form = FORMS[name]
    draw = random.Random(name)
    n_held = 0
    while n_held < 15:
        times = {
            "n": draw.randint(3, 6),
            "f": draw.randint(1, 9),
            "b": draw.randint(1, 15),
            "g": draw.randint(1, 12),
            "r": draw.randint(1, 12),
            "a": draw.randint(1, 20),
            "o": draw.randint(0, 3),
            "k": draw.randint(1, 3),
        }
        if not form.holds(**times):
            continue
        n_held += 1
        k = times["k"]
        of_units = {key: value for key, value in times.items() if key != "k"}
        settings = Settings(
            equal_units(**of_units),
            micro_batches=(*[form.earlier] * (k - 1), MicroBatch()),
            max_input_buffers=draw.choice((1, 2, 3)),
            **form.settings,
        )
        assert step_time(drive(settings)) == form.time(**times), settings
        if not settings.serial:
            assert step_time(rows_by_rules(settings)) == form.time(**times), settings


@pytest.mark.parametrize("tens", range(0, 400, 10))
def test_rules_are_what_torch_does(tens: int) -> None:
    """Same operations, order, starts and ends."""
    for seed in range(tens, tens + 10):
        settings = random_settings(seed)
        assert rows_by_rules(settings) == drive(settings), settings


def test_random_settings_are_of_every_kind() -> None:
    drawn = [random_settings(seed) for seed in range(400)]
    assert [random_settings(seed) for seed in range(400)] == drawn
    assert {each.shard for each in drawn} == {1, 2, 4, 8}
    assert {each.replicas for each in drawn} == {1, 2, 3}
    assert {each.forward_prefetch for each in drawn} == {each.backward_prefetch for each in drawn} == {0, 1, 2, 3}
    assert {each.max_input_buffers for each in drawn} == {1, 2, 3}
    assert {each.copy_out for each in drawn} == {0, 1, 2, 5}
    assert {(each.root is None, each.separate_group) for each in drawn} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert {str(each.reshard_after_forward) for each in drawn} == {"None", "True", "False", "1", "2", "4", "8"}
    assert {len(each.micro_batches) for each in drawn} == {1, 2, 3, 4}
    assert len({each for settings in drawn for each in settings.micro_batches}) == 16
    assert len({len(set(each.units)) == 1 for each in drawn}) == 2


@by_torch_and_by_rules
def test_last_gather_of_backward_waits_for_the_forward_pass_where_parts_are_cut(rows_of: RowsOf) -> None:
    """With whole shards it hides behind the forward pass; with an integer, the parts exist only when that has ended."""
    units = equal_units(3, f=4, b=8, g=2, r=3, regather=1)
    whole = shown(rows_of(Settings(units, shard=4)))
    parts = shown(rows_of(Settings(units, shard=4, reshard_after_forward=2)))
    assert [text for text in whole if text[:3] in ("F2 ", "AG'", "B2 ")] == [
        "F2 10-14", "AG'2 10-12", "AG'1 14-16", "B2 14-22", "AG'0 25-27",
    ]  # fmt: skip
    assert [text for text in parts if text[:3] in ("F2 ", "AG'", "B2 ")] == [
        "F2 10-14", "AG'2 14-15", "AG'1 15-16", "B2 15-23", "AG'0 23-24",
    ]  # fmt: skip


@by_torch_and_by_rules
def test_first_unit_reduces_after_all_others_only_if_the_root_holds_parameters(rows_of: RowsOf) -> None:
    units = equal_units(2, f=4, b=8, g=2, r=3, a=20, o=0)
    root = Root(gather=2, reduce_scatter=3, all_reduce=20, after=Passes(1, 2))
    without = shown(rows_of(Settings(units, replicas=2)))
    assert without[-6:] == ["B1 10-18", "RS1 18-21", "AR1 21-41", "B0 18-26", "RS0 26-29", "AR0 41-61"]
    with_root = shown(rows_of(Settings(units, root, replicas=2)))
    assert with_root[-5:] == ["B0 23-31", "RSroot 31-34", "ARroot 46-66", "RS0 66-69", "AR0 69-89"]


@by_torch_and_by_rules
def test_backward_passes_that_are_not_the_last_gather_the_last_unit_for_nothing_once(rows_of: RowsOf) -> None:
    """The next forward pass uses what the first unit's turn gathered; after the last backward pass it is lost."""
    units = equal_units(3, f=4, b=8, g=2, r=3)
    earlier = MicroBatch(is_last=False)
    rows = rows_of(Settings(units, micro_batches=(earlier, earlier, MicroBatch())))
    gathers = Counter((row.micro_batch, row.kind, row.unit) for row in rows if row.kind in (GATHER, BACKWARD_GATHER))
    assert gathers[1, BACKWARD_GATHER, 2] == 2
    assert gathers[2, GATHER, 2] == 0
    assert gathers[2, BACKWARD_GATHER, 2] == 2
    assert gathers.total() == 3 * 6 + 1


@by_torch_and_by_rules
def test_gathers_over_several_micro_batches(rows_of: RowsOf) -> None:
    """2k and k; with `set_reshard_after_backward(False)` in all but the last, k + 1 and 1."""
    for reshard, reshards, n_gathers in [(True, True, 6), (False, True, 3), (True, False, 4), (False, False, 1)]:
        settings = Settings(
            equal_units(3, f=4, b=8, g=2, r=3),
            reshard_after_forward=reshard,
            micro_batches=(MicroBatch(reshards=reshards), MicroBatch(reshards=reshards), MicroBatch()),
        )
        found = Counter(row.unit for row in rows_of(settings) if row.kind in (GATHER, BACKWARD_GATHER))
        assert found == {0: n_gathers, 1: n_gathers, 2: n_gathers}


def test_late_ranks_meet_in_every_unit_of_every_micro_batch() -> None:
    """Two copies of two ranks. Rank 0 is late in the first micro-batch, rank 1 in the second, rank 3 in the third."""
    settings = Settings(
        units=equal_units(3, f=2, b=4, g=0, r=0), shard=2, replicas=2, micro_batches=(MicroBatch(),) * 3
    )
    late = [(50, 0, 0), (0, 50, 0), (0, 0, 0), (0, 0, 50)]
    for rows in rows_of_ranks(drive, settings, [OneRank((each,)) for each in late]):
        assert rows[-1].end == 3 * 50 + 3 * 3 * (2 + 4) + 1
    rarely = replace(settings, micro_batches=(*[MicroBatch(all_reduces=False)] * 2, MicroBatch()))
    for rows in rows_of_ranks(drive, rarely, [OneRank((each,)) for each in late]):
        assert rows[-1].end == 2 * 50 + 3 * 3 * (2 + 4) + 1


def test_rules_of_late_ranks_are_those_of_torch() -> None:
    for seed, settings in late_jobs(60):
        late = random_lateness(settings, seed)
        assert rows_of_ranks(drive, settings, late) == rows_of_ranks(rows_by_rules, settings, late), seed
