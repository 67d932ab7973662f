"""Settings of all tests, and which of them are slow."""

import gc
import os
import signal
from collections.abc import Generator, Iterator

import pytest
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

# Tests that start other processes or compute whole experiments; other tests say themselves that they are slow.
SLOW = (
    "tests/experiments/",
    "tests/project/test_benchmarks.py",
    "tests/project/test_docs.py",
    "tests/project/test_documentation_site.py",
    "tests/project/test_notebooks.py",
    "tests/real/",
    "tests/simdist/sweeps/test_dask.py",
    "tests/simdist/sweeps/test_run.py",
)
QUICK = ("tests/real/kernels/test_topk.py", "tests/real/programs/", "tests/real/recording/")
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


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests, and spread them over the first three quarters of all tests.

    Many of them wait for processes, and quick ones run meanwhile; no worker is left with a long one at the end.

    Tests that are marked `full` are for `make full`, so they are left out unless `-m` speaks of them.
    """
    if "full" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("full")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("full")]
    for item in items:
        path = item.path.relative_to(config.rootpath).as_posix()
        in_slow_place = path.startswith(SLOW) and not path.startswith(QUICK)
        fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
        if in_slow_place or "browser" in fixtures:
            item.add_marker(pytest.mark.slow)
        if path.startswith(COMPUTED_ONCE) or any(found[-1].scope == "module" for found in fixtures.values()):
            item.add_marker(pytest.mark.xdist_group(path))
    slow = [item for item in items if item.get_closest_marker("slow")]
    quick = [item for item in items if not item.get_closest_marker("slow")]
    places = {item: 0.75 * number / len(slow) for number, item in enumerate(slow)}
    places |= {item: number / len(quick) for number, item in enumerate(quick)}
    items.sort(key=places.__getitem__)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes `-n auto` means: as many as CPUs, or half as many again with slow tests, which wait."""
    n_cpus = os.cpu_count() or 1
    return max(2, n_cpus if config.option.markexpr == "not slow" else n_cpus * 3 // 2)


# A shell without job control starts what runs in its background with SIGINT ignored, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
