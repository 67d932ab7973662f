"""The kernels for GPUs select what the plain algorithms do. Without a GPU, Triton's interpreter runs them.

The interpreter is slow, so vectors are short, and they are cut into small tiles for every kernel to have several.
"""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from real.buffers.memory import Memory  # noqa: E402
from real.buffers.transforms import transform, warm_up_transforms  # noqa: E402
from real.kernels import thresholds  # noqa: E402
from real.kernels.topk import Scale, heights, select_largest  # noqa: E402
from simdist.plan import Buffer, Plan, Select  # noqa: E402
from simdist.plan.ops import SelectMethod  # noqa: E402

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TINY = {"tile": 256, "max_spans": 2}
gpu = pytest.mark.skipif(not ON_GPU, reason="no GPU: torch.cuda.is_available() is False")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whole_numbers(count: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers whose sum is exact in any order, so that all see the same mean; 5 % are much larger."""
    small = torch.randint(-64, 65, (count,), generator=seeded(1))
    large = torch.randint(-30, 31, (count,), generator=seeded(2)) * 64
    return torch.where(torch.rand(count, generator=seeded(3)) < 0.05, large, small).to(DEVICE, dtype)


def kernels(
    values: Tensor, k: int, drawn: Tensor, *, n_bisections: int | None = 20, layout: dict[str, int] = TINY
) -> Tensor:
    """Select with the kernels of mstopk: triton is imported only where a test runs."""
    from real.kernels.triton_candidates import Layout
    from real.kernels.triton_mstopk import mstopk as select_by_kernels

    return select_by_kernels(values, k, drawn, n_bisections=n_bisections, layout=Layout(**layout))


def plainly(values: Tensor, k: int, drawn: float, n_bisections: int) -> list[int]:
    """Return the positions on levels above that of the k-th largest, and a stretch of those on it."""
    magnitudes = thresholds.finite_magnitudes(values)
    mean = magnitudes.sum(dtype=torch.float64) / magnitudes.numel()
    levels = heights(magnitudes, Scale.of(mean, magnitudes.max(), n_bisections))
    kth = levels.sort(descending=True).values[k - 1]
    certain, possible = ((each).nonzero().squeeze(1).tolist() for each in (levels > kth, levels == kth))
    first = int(drawn * (len(possible) - (k - len(certain)) + 1))
    return sorted(certain + possible[first : first + k - len(certain)])


def assert_like_plain(
    values: Tensor, k: int, *, drawn: float = 0.3, n_bisections: int = 12, layout: dict[str, int] = TINY
) -> list[int]:
    """Assert that kernels take k different positions, those of the highest levels."""
    where = torch.tensor(drawn, dtype=torch.float64, device=values.device)
    taken = kernels(values, k, where, n_bisections=n_bisections, layout=layout)
    assert (taken.dtype, taken.shape) == (torch.int32, (k,))
    found = sorted(taken.tolist())
    assert found == plainly(values, k, drawn, n_bisections)
    assert len(set(found)) == k
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "k"),
    [(2, 1), (256, 200), (257, 1), (1025, 1024), (1501, 20)],
)
def test_kernels_select_what_is_on_the_highest_levels(count: int, k: int, dtype: torch.dtype) -> None:
    assert_like_plain(whole_numbers(count, dtype=dtype), k)


@pytest.mark.parametrize("dtypes", [(each, each) for each in DTYPES] + [(torch.float32, torch.bfloat16)])
def test_the_read_that_adds_a_vector_rounds_as_torch_does(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    from real.kernels.triton_candidates import Layout
    from real.kernels.triton_mstopk import mstopk as select_by_kernels

    residual, grad = (torch.randn(1001, generator=seeded(seed)).to(DEVICE, each) for seed, each in enumerate(dtypes))
    if torch.bfloat16 in dtypes and not ON_GPU:  # Triton's interpreter cuts their digits off; these sums have few
        residual, grad = (each.mul(16).round() for each in (residual, grad))
    total, drawn = residual + grad, torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    taken = select_by_kernels(residual, 20, drawn, n_bisections=20, added=grad, layout=Layout(**TINY))
    assert torch.equal(residual, total)
    assert torch.equal(taken, kernels(total, 20, drawn))


@pytest.mark.parametrize("n_bisections", [1, 4, 7, 8, 20, 23])
def test_any_number_of_bisections_is_done_digit_by_digit(n_bisections: int) -> None:
    assert_like_plain(whole_numbers(700), 10, n_bisections=n_bisections)


@pytest.mark.parametrize("drawn", [0.0, 0.5, 1 - 2**-53])
def test_stretch_lies_among_the_ties_wherever_it_begins(drawn: float) -> None:
    values = torch.zeros(1000, device=DEVICE)
    values[::3] = 1.0
    values[5] = 2.0
    found = assert_like_plain(values, 11, drawn=drawn)
    assert 5 in found
    begin = math.floor(drawn * (334 - 10 + 1))
    assert [each // 3 for each in found if each != 5] == list(range(begin, begin + 10))


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e30, 1e-40])
@pytest.mark.parametrize("k", [1, 499])
def test_constant_vector_gives_any_k(constant: float, k: int) -> None:
    values = torch.full((500,), constant, device=DEVICE)
    taken = kernels(values, k, torch.tensor(0.9, dtype=torch.float64, device=DEVICE))
    assert taken.unique().numel() == k


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_values_are_selected_first(bad: float, dtype: torch.dtype) -> None:
    values = whole_numbers(1000, dtype=dtype)
    values[[3, 700, 999]] = bad
    assert {3, 700, 999} <= set(assert_like_plain(values, 10))


def test_magnitudes_far_below_the_largest_are_told_apart() -> None:
    values = whole_numbers(800) * 2.0**-40  # below the cells in which maxima are counted
    values[77] = 1.0
    assert 77 in assert_like_plain(values, 100, n_bisections=23)


def test_all_large_ones_in_one_span_are_found() -> None:
    values = whole_numbers(1000)
    values[700:764] = 2.0**15
    assert assert_like_plain(values, 64) == list(range(700, 764))


def test_every_second_entry_of_a_buffer_is_a_vector_too() -> None:
    assert_like_plain(whole_numbers(1000)[::2], 50)


def test_default_cut_selects_the_same() -> None:
    assert_like_plain(whole_numbers(9000), 90, layout={})


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, of a sum of numbers like the largest
@settings(max_examples=40 if ON_GPU else 10)
@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=2, max_size=40), data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_vector_gives_exactly_k(bits: list[int], data: st.DataObject, dtype: object) -> None:
    assert isinstance(dtype, torch.dtype)
    values = np.array(bits, np.uint16).view(np.float16)
    k = data.draw(st.integers(1, len(values) - 1))
    drawn = torch.tensor(data.draw(st.floats(0, 1, exclude_max=True)), dtype=torch.float64, device=DEVICE)
    taken = kernels(torch.tensor(values).to(DEVICE, dtype), k, drawn).tolist()
    assert len(set(taken)) == k
    assert min(taken) >= 0
    assert max(taken) < len(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "k"), [(257, 1), (1025, 200), (1501, 20)])
def test_kernels_that_tell_all_magnitudes_apart_take_the_largest(count: int, k: int, dtype: torch.dtype) -> None:
    values = torch.randn(count, generator=seeded()).to(DEVICE, dtype)
    values[[3, 200]] = torch.tensor([3e38, -3.2e38]).to(DEVICE, dtype)  # beyond what mstopk tells apart
    assert_largest(values, k, exactly(values, k))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_exact_kernels_take_what_is_not_finite_first(bad: float) -> None:
    values = torch.randn(1000, generator=seeded()).to(DEVICE)
    values[[0, 999]] = bad
    assert {0, 999} <= set(exactly(values, 10).tolist())


def exactly(values: Tensor, k: int) -> Tensor:
    first = torch.zeros((), dtype=torch.float64, device=values.device)
    return kernels(values, k, first, n_bisections=None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rank", [100, 101, 300, 1000]
)  # of the threshold: as many as k reach it, or a few more, or all
def test_dgc_takes_the_largest_of_those_that_reach_the_threshold(rank: int, dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=seeded()).to(DEVICE, dtype)
    assert_largest(values, 100, by_dgc(values, 100, rank))


@pytest.mark.parametrize("rank", [1, 99])
def test_dgc_takes_from_all_if_too_few_reach_the_threshold(rank: int) -> None:
    values = torch.randn(1000, generator=seeded()).to(DEVICE)
    assert_largest(values, 100, by_dgc(values, 100, rank))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_dgc_takes_what_is_not_finite_first(bad: float) -> None:
    values = torch.randn(1000, generator=seeded()).to(DEVICE)
    values[[0, 999]] = bad
    assert {0, 999} <= set(by_dgc(values, 10, 20).tolist())


def test_dgc_takes_some_of_many_equals() -> None:
    values = torch.ones(700, device=DEVICE)
    assert_largest(values, 100, by_dgc(values, 100, 300))


def by_dgc(values: Tensor, k: int, rank: int) -> Tensor:
    """Select with the kernels of dgc, given the magnitude of a rank as threshold."""
    from real.kernels.triton_candidates import Layout
    from real.kernels.triton_dgc import dgc

    magnitudes = values.float().abs().nan_to_num(nan=math.inf)
    threshold = magnitudes.sort(descending=True).values[rank - 1]
    drawn = torch.tensor(0.7, dtype=torch.float64, device=values.device)
    return dgc(values, k, threshold.clamp(max=2.0**126), drawn, layout=Layout(**TINY))


def assert_largest(values: Tensor, k: int, taken: Tensor) -> None:
    assert (taken.dtype, taken.unique().numel()) == (torch.int32, k)
    magnitudes = values.float().abs()
    assert torch.equal(
        magnitudes[taken.long()].sort(descending=True).values, magnitudes.sort(descending=True).values[:k]
    )


def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[3] / "tests" / "compile_kernels.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    compiled = dict(line.split(": ") for line in done.stdout.splitlines())
    assert len(compiled) == 13
    assert all(int(n) > 0 for n in compiled.values())


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [2**16, 2**20 + 3, 2**24])
@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.3])
def test_gpu_selects_what_is_on_the_highest_levels(density: float, count: int, dtype: torch.dtype) -> None:
    assert_like_plain(whole_numbers(count, dtype=dtype), int(density * count), n_bisections=20, layout={})


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["mstopk", "dgc"])
def test_host_of_the_gpu_never_waits(method: SelectMethod, dtype: torch.dtype) -> None:
    values = whole_numbers(100_000, dtype=dtype)
    select_largest(values, 100, method, generator=seeded(), kernels_from=0)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, indices = select_largest(values, 100, method, generator=seeded(), kernels_from=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert indices.unique().numel() == 100


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("kernels_from", [0, 2**40])
@pytest.mark.parametrize("method", get_args(SelectMethod))
def test_a_graph_selects_what_launched_kernels_do(method: SelectMethod, kernels_from: int) -> None:
    op = Select("grad", "top", "residual", 4000, method)
    buffers = (
        Buffer("grad", 2**22, initialized=True),
        Buffer("residual", 2**22, initialized=True),
        Buffer("top", 4000, sparse=True),
    )
    plan = Plan.from_steps("one", world_size=1, buffers=buffers, steps=[(op,)])
    launched, recorded = (
        Memory(plan, DEVICE, {each.name for each in buffers}, kernels_from=kernels_from) for _ in range(2)
    )
    warm_up_transforms(plan, recorded)
    assert recorded.graphs is not None
    assert recorded.graphs.refused == {}
    for step in range(3):
        grad = torch.randn(2**22, device=DEVICE)
        for memory in (launched, recorded):
            memory.dense("grad").copy_(grad)
            transform(memory, op, step=step, rank=0)
        for name in ("top", "residual"):
            assert all(map(torch.equal, launched.tensors(name), recorded.tensors(name)))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("method", ["mstopk", "dgc"])
def test_same_draw_gives_the_same_selection_in_the_same_order(method: SelectMethod) -> None:
    values = torch.randn(2**22, device=DEVICE)
    first, again = (select_largest(values, 4000, method, generator=seeded(), kernels_from=0)[1] for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.gpu
@gpu
@pytest.mark.skipif(ON_GPU and torch.cuda.get_device_properties(0).total_memory < 16 * 2**30, reason="needs 16 GiB")
def test_a_quarter_of_a_billion_entries_are_no_exception() -> None:
    values = torch.randn(2**28 + 1, device=DEVICE)
    values[-1] = 100.0
    chosen, indices = select_largest(values, 2**18, "mstopk", generator=seeded())
    kth = torch.topk(values.abs(), 2**18, sorted=False).values.min()
    assert indices.unique().numel() == 2**18
    assert int(indices.max()) == 2**28
    assert float((chosen.abs() >= kth).double().mean()) >= 0.9999
