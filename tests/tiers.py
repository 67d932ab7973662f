"""Which tests run where people wait: tiers, from the measured CPU seconds of each test.

A tier has all tests that cost no more than its limit, and the sentinels, which stand for a dearer kind. The costs stand
in `costs.json` beside this file: `make costs` measures them in `ci`, then raises them to what they are in the tiers
below. A test that is not in the table is cheap, or new.

| tier | tests |
|---|---|
| `check` | up to 0.05 CPU seconds, while one edits |
| `test` | up to 0.4 CPU seconds, and the sentinels |
| `ci` | all but those marked `full` |
| `full` | all |
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings

TIERS = ("check", "test", "ci", "full")
TABLE = Path(__file__).parent / "costs.json"
# Largest cost of a test, and of all tests of the tier together, in CPU seconds. Two cores share the latter.
LIMIT_S = {"check": 0.05, "test": 0.4}
BUDGET_S = {"check": 200.0, "test": 700.0, "ci": 2000.0}
LEAST_LISTED_S = 0.05
_SHARE = 10  # of the examples that hypothesis draws in `ci`, one in so many is drawn in the tiers below
_FEWEST = 5
_DRAWS_FEW = "SIMDIST_FEW_EXAMPLES"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def examples(number: int) -> settings:
    """Return settings of hypothesis for `number` examples, or fewer in the tiers `check` and `test`."""
    if _DRAWS_FEW in os.environ:
        number = min(number, max(_FEWEST, number // _SHARE))
    return settings(max_examples=number)


def draw_for(tier: str) -> None:
    """Tell `examples` how many are wanted. Call this before test modules are imported."""
    os.environ.pop(_DRAWS_FEW, None)
    if tier in LIMIT_S:
        os.environ[_DRAWS_FEW] = "1"


def is_drawn(item: pytest.Item) -> bool:
    """Return whether hypothesis draws the examples of a test."""
    return hasattr(getattr(item, "obj", None), "hypothesis")


def name_of(item: pytest.Item) -> str:
    """Return the node ID of a test, without the group that pytest-xdist adds to it."""
    group = item.get_closest_marker("xdist_group")
    return item.nodeid.removesuffix(f"@{group.args[0]}") if group else item.nodeid


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU seconds of tests with all their examples.

    Args:
        cheap_s: Of all tests together that are not listed.
        listed: Node ID -> CPU seconds, of tests of at least `LEAST_LISTED_S`.
    """

    cheap_s: float = 0.0
    listed: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = TABLE) -> "Costs":
        """Read the table; an empty one if there is none."""
        if not path.exists():
            return cls()
        content = json.loads(path.read_text(encoding="utf-8"))
        listed = {f"{place}::{name}": cost for place, found in content["tests"].items() for name, cost in found.items()}
        return cls(content["cheap_s"], listed)

    @classmethod
    def of(cls, measured: Mapping[str, float]) -> "Costs":
        """Return the costs of tests: node ID -> CPU seconds."""
        listed = {name: round(cost, 2) for name, cost in measured.items() if cost >= LEAST_LISTED_S}
        cheap_s = math.fsum(cost for name, cost in measured.items() if name not in listed)
        return cls(round(cheap_s, 1), listed)

    def raised(self, measured: Mapping[str, float]) -> "Costs":
        """Return these costs, but those of a part of the tests where they are higher.

        What several tests use is made by the first of them, which another part may lack.
        """
        listed = dict(self.listed)
        for name, cost in Costs.of(measured).listed.items():
            listed[name] = max(cost, listed.get(name, 0.0))
        return Costs(self.cheap_s, listed)

    def write(self, path: Path = TABLE) -> None:
        """Write the table, sorted by file and name."""
        by_file: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for name in sorted(self.listed):
            place, _, rest = name.partition("::")
            by_file[place][rest] = self.listed[name]
        content = {"cheap_s": self.cheap_s, "tests": by_file}
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def of_test(self, item: pytest.Item, tier: str) -> float:
        """Return what a test costs in a tier, in CPU seconds."""
        cost = self.listed.get(name_of(item), 0.0)
        return cost / _SHARE if tier in LIMIT_S and is_drawn(item) else cost

    def has(self, item: pytest.Item, tier: str) -> bool:
        """Return whether a test belongs to a tier."""
        if item.get_closest_marker("full"):
            return tier == "full"
        if tier not in LIMIT_S or self.of_test(item, tier) <= LIMIT_S[tier]:
            return True
        return tier == "test" and item.get_closest_marker("sentinel") is not None

    def total_s(self, items: Iterable[pytest.Item], tier: str) -> float:
        """Return the CPU seconds of all tests of a tier."""
        return self.cheap_s + math.fsum(self.of_test(item, tier) for item in items if self.has(item, tier))


def cpu_s() -> float:
    """Return the CPU seconds of this process, of its descendants, and of those that have ended."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    waiting = _children(os.getpid())
    while waiting:
        pid = waiting.pop()
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, stat[11:15])) / _TICKS_PER_S  # utime, stime, cutime, cstime: see proc(5)
        waiting += _children(pid)
    return total


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:  # it has ended, or the system has no such table
        pass
    return found


class Meter:
    """A pytest plugin that measures the CPU seconds of tests.

    What a fixture of a module or session costs is shared equally by the tests that use it.

    Attributes:
        costs: Node ID -> CPU seconds of the test, with its part of shared fixtures.
    """

    def __init__(self) -> None:
        self.costs: dict[str, float] = {}
        self._shared_s: defaultdict[str, float] = defaultdict(float)  # fixture -> CPU seconds of its making
        self._users: defaultdict[str, list[str]] = defaultdict(list)  # fixture -> node IDs
        self._in_fixtures_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        """Measure a test with its setup and teardown."""
        begin_s = cpu_s()
        self._in_fixtures_s = 0.0
        done = yield
        self.costs[name_of(item)] = max(0.0, cpu_s() - begin_s - self._in_fixtures_s)
        for name, found in getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {}).items():
            if found[-1].scope != "function":
                self._users[f"{found[-1].baseid}::{name}"].append(name_of(item))
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> object:
        """Measure the making of a fixture that tests share."""
        if fixturedef.scope == "function":
            return (yield)
        begin_s = cpu_s()
        inner_s = self._in_fixtures_s
        try:
            return (yield)
        finally:
            made_s = cpu_s() - begin_s - (self._in_fixtures_s - inner_s)
            self._shared_s[f"{fixturedef.baseid}::{fixturedef.argname}"] += made_s
            self._in_fixtures_s += made_s

    def total(self) -> dict[str, float]:
        """Return the costs with the parts of shared fixtures."""
        costs = dict(self.costs)
        for fixture, made_s in self._shared_s.items():
            users = self._users[fixture]
            for user in users:
                costs[user] += made_s / len(users)
        return costs
