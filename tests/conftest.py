"""Settings of all tests, and which of them run."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiers
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "simdist",
    deadline=None,  # no test of wall-clock time
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
    phases=(Phase.explicit, Phase.generate) if "UNSHRUNK" in os.environ else tuple(Phase),
)
settings.load_profile("simdist")

# Threads of torch that wait for each other keep busy, and there is a test for every core already.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The tests of a file here, and those with a fixture of their module, share what takes long: one worker gets them all.
# Tests of other files run between those of a file elsewhere, so each such fixture would be made over and over.
COMPUTED_ONCE = (
    "tests/experiments/",
    "tests/project/test_data_dictionary.py",
    "tests/project/test_documentation_site.py",
    "tests/simdist/engines/test_closed_forms.py",
    "tests/simdist/sweeps/test_dask.py",
    "tests/simdist/tuning/test_search.py",
)
DEAR_S = 0.5
WHOLE_TIER = 5000  # tests
FAR = 3.0
METER = pytest.StashKey[tiers.Meter]()


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was() -> Iterator[None]:
    """Fail a test that leaves another environment or working directory to the tests after it, and mend them.

    `sys.path` may grow: tasks and plugins add the folder that they are in, as they would in a process of their own.
    """
    environ_before = _environ()
    folder_before = os.getcwd()
    yield
    left = []
    environ = _environ()
    for name in sorted(environ.keys() | environ_before.keys()):
        value, value_before = environ.get(name), environ_before.get(name)
        if value != value_before:
            left.append(f"os.environ[{name!r}] was {value_before!r}, is {value!r}")
            os.environ.pop(name, None)
            if value_before is not None:
                os.environ[name] = value_before
    if os.getcwd() != folder_before:
        left.append(f"the working directory was {folder_before}, is {os.getcwd()}")
        os.chdir(folder_before)
    if left:
        pytest.fail("it leaves to other tests: " + "; ".join(left), pytrace=False)


def _environ() -> dict[str, str]:
    """Return the environment, but for what pytest changes during a test, and torch when it first compiles."""
    found = dict(os.environ)
    found.pop("PYTEST_CURRENT_TEST", None)
    found.pop("TORCHINDUCTOR_CACHE_DIR", None)
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector off the modules and tests: they live to the end, and its looks at them took longer."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(20_000)  # of objects before it looks again, 700 by default


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose tests by what they cost, and measure that."""
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=tiers.TIERS, default="ci", help="tests of this tier, see tests/tiers.py")
    group.addoption("--costs", type=Path, metavar="FILE", help="write the CPU seconds of each test as a table")


def pytest_configure(config: pytest.Config) -> None:
    """Draw as many examples as the tier says, and measure what tests cost."""
    os.environ.pop("PYTEST_ADDOPTS", None)  # has been read, and is not meant for what tests start
    tiers.draw_for(config.option.tier)
    config.stash[METER] = tiers.Meter()
    config.pluginmanager.register(config.stash[METER])


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests of the tier, and spread the dear ones over the first three quarters of all tests.

    Many of them wait for processes, and quick ones run meanwhile; no worker is left with a long one at the end.
    """
    tier = config.option.tier
    costs = tiers.Costs.read()
    left_out = [item for item in items if not costs.has(item, tier)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if costs.has(item, tier)]
    for item in items:
        path = item.path.relative_to(config.rootpath).as_posix()
        fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
        if path.startswith(COMPUTED_ONCE) or any(found[-1].scope == "module" for found in fixtures.values()):
            item.add_marker(pytest.mark.xdist_group(path))
    cost = {item: costs.of_test(item, tier) for item in items}
    dear = [item for item in items if cost[item] > DEAR_S]
    cheap = [item for item in items if cost[item] <= DEAR_S]
    places = {item: 0.75 * number / len(dear) for number, item in enumerate(dear)}
    places |= {item: number / len(cheap) for number, item in enumerate(cheap)}
    items.sort(key=places.__getitem__)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes `-n auto` means: as many as CPUs, but two at least, since some tests wait."""
    return max(2, os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker has measured."""
    node.config.stash[METER].costs.update(getattr(node, "workeroutput", {}).get("costs", {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what was measured to the controller; there, write the table if it is wanted."""
    costs = session.config.stash[METER].total()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = costs
    elif path := session.config.option.costs:
        is_part = session.config.option.tier in tiers.LIMIT_S
        (tiers.Costs.read(path).raised(costs) if is_part else tiers.Costs.of(costs)).write(path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell what a whole tier cost, and which tests are dearer than its limit by far."""
    tier = config.option.tier
    costs = config.stash[METER].total()
    if tier not in tiers.LIMIT_S or len(costs) < WHOLE_TIER:
        return
    terminalreporter.section(f"cost of the tier {tier}")
    terminalreporter.line(
        f"{sum(costs.values()):.0f} CPU seconds of {len(costs)} tests; budget {tiers.BUDGET_S[tier]:g}"
    )
    known = tiers.Costs.read().listed
    for name, cost in sorted(costs.items(), key=lambda found: -found[1])[:20]:
        if cost > max(FAR * tiers.LIMIT_S[tier], FAR * known.get(name, 0.0)):
            terminalreporter.line(f"{cost:.1f} CPU s, not measured before (make costs): {name}")


# A shell without job control starts what runs in its background with SIGINT ignored, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
