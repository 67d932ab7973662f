"""Top-k selection: exactly k different entries, nearly the largest ones, whatever the vector looks like."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from real.kernels import thresholds, topk  # noqa: E402
from real.kernels.topk import Scale, densify, heights, select_largest  # noqa: E402
from simdist.errors import RunError  # noqa: E402
from simdist.plan.ops import SelectMethod as Method  # noqa: E402

METHODS: tuple[Method, ...] = get_args(Method)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

each_method = pytest.mark.parametrize("method", METHODS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(count: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=seeded(seed)).to(dtype)


def selected(values: Tensor, k: int, method: Method) -> tuple[Tensor, Tensor]:
    """Select, and check what every selection promises."""
    chosen, indices = select_largest(values, k, method, generator=seeded(1))
    assert chosen.shape == indices.shape == (k,)
    assert (chosen.dtype, indices.dtype) == (values.dtype, torch.int32)
    assert indices.unique().numel() == k
    assert torch.equal(chosen.nan_to_num(), values[indices.long()].nan_to_num())
    return chosen, indices


def recall(values: Tensor, k: int, method: Method) -> float:
    """Share of the k that are as large as the k-th largest."""
    chosen, _ = selected(values, k, method)
    kth = values.abs().sort(descending=True).values[k - 1]
    return float((chosen.abs() >= kth).double().mean())


@each_method
def test_signed_values_come_back_with_their_places(method: Method) -> None:
    values = torch.tensor([0.5, -8.0, 0.0, 4.0, -0.25, 1.0])
    chosen, indices = selected(values, 2, method)
    assert dict(zip(indices.tolist(), chosen.tolist(), strict=True)) == {1: -8.0, 3: 4.0}


@pytest.mark.parametrize("dtype", DTYPES)
@each_method
def test_dtype_stays_and_large_ones_are_found(method: Method, dtype: torch.dtype) -> None:
    assert recall(normal(20_000, dtype=dtype), 200, method) >= 0.99


@pytest.mark.parametrize(("n_bisections", "least"), [(10, 0.96), (15, 0.999), (20, 0.9999)])
@pytest.mark.parametrize("density", [0.001, 0.01])
def test_recall_of_mstopk_grows_with_the_number_of_bisections(density: float, n_bisections: int, least: float) -> None:
    values = normal(1_000_000)
    k = int(density * values.numel())
    magnitudes = values.abs()
    kth = magnitudes.sort(descending=True).values[k - 1]
    found = magnitudes[topk.by_groups(values, k, 0.7, n_bisections=n_bisections)] >= kth
    assert found.double().mean() >= least


def test_one_bisection_misses_many() -> None:
    values = normal(100_000).abs()
    found = values[topk.by_groups(values, 1000, 0.7, n_bisections=1)] >= values.sort().values[-1000]
    assert 0.5 < found.double().mean() < 0.9


def whole_numbers(count: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers whose sum is exact in any order, so that all see the same mean; 5 % are much larger."""
    small = torch.randint(-64, 65, (count,), generator=seeded(seed))
    large = torch.randint(-30, 31, (count,), generator=seeded(seed + 1)) * 64
    return torch.where(torch.rand(count, generator=seeded(seed + 2)) < 0.05, large, small).to(dtype)


def by_the_paper(values: Tensor, k: int, drawn: float, n_bisections: int) -> set[int]:
    """Find the thresholds of algorithm 1 as published, in float64; where it has none, between 0 and the mean."""
    magnitudes = values.double().abs()
    mean, highest = magnitudes.mean(), magnitudes.max()
    base, top = (mean, highest) if (magnitudes >= mean).sum() >= k else (torch.zeros_like(mean), mean)
    left, right, n_right = 0.0, 1.0, 0
    upper, lower = None, base
    for _ in range(n_bisections):
        ratio = (left + right) / 2
        threshold = base + ratio * (top - base)
        nnz = int((magnitudes >= threshold).sum())
        if nnz <= k:
            right, upper, n_right = ratio, threshold, nnz
        else:
            left, lower = ratio, threshold
    if upper is None:  # no threshold was reached by k or fewer
        upper = mean if top is mean else torch.tensor(math.inf)
        n_right = int((magnitudes >= upper).sum())
    certain = magnitudes >= upper
    [*possible] = ((magnitudes >= lower) & ~certain).nonzero().squeeze(1).tolist()
    first = int(drawn * (len(possible) - (k - n_right) + 1))
    return {*certain.nonzero().squeeze(1).tolist(), *possible[first : first + k - n_right]}


each_draw = pytest.mark.parametrize("drawn", [0.0, 0.4, 1 - 2**-53])


@each_draw
@pytest.mark.parametrize("n_bisections", [1, 2, 5, 8, 20])
@pytest.mark.parametrize("k", [1, 37, 500, 2500, 4999])
def test_mstopk_takes_what_the_paper_does(k: int, n_bisections: int, drawn: float) -> None:
    values = whole_numbers(5000)
    expected = by_the_paper(values, k, drawn, n_bisections)
    assert len(expected) == k
    assert set(topk.by_groups(values, k, drawn, n_bisections=n_bisections).tolist()) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "density"), [(2, 0.5), (31, 0.1), (64, 0.9), (65, 0.02), (3001, 0.01), (3001, 0.3), (2**20 + 33, 0.001)]
)
def test_one_read_selects_what_many_reads_do(count: int, density: float, dtype: torch.dtype) -> None:
    values = whole_numbers(count, dtype=dtype)
    k = max(1, int(density * count))
    fast = topk.by_groups(values, k, 0.3, n_bisections=12)
    assert set(fast.tolist()) == by_the_paper(values, k, 0.3, 12)


def test_one_group_that_holds_all_large_ones_is_enough() -> None:
    values = normal(10_000)
    values[6400:6464] *= 1e6
    _, indices = selected(values, 64, "mstopk")
    assert sorted(indices.tolist()) == list(range(6400, 6464))


@each_method
def test_heavy_tails_are_no_obstacle(method: Method) -> None:
    uniform = torch.rand(100_000, generator=seeded(), dtype=torch.float64)
    values = torch.tan((uniform - 0.5) * math.pi)  # Cauchy: it has no mean
    chosen, _ = selected(values, 1000, method)
    assert int((chosen.abs() >= values.abs().sort().values[-100]).sum()) >= 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_kth_largest_is_rounded_down_to_is_reached_by_few_more(dtype: torch.dtype) -> None:
    magnitudes = normal(100_000, dtype=dtype).abs()
    kth = float(magnitudes.sort(descending=True).values[999])
    rounded = thresholds.reached_by(magnitudes, 1000)
    assert kth / (1 + 2**-4) < rounded <= kth


def test_all_that_reach_the_level_of_a_magnitude_reach_its_foot() -> None:
    magnitudes = normal(200_000).abs().sort().values
    scale = Scale.of(magnitudes.double().mean(), magnitudes[-1], 10)
    _, counts = heights(magnitudes, scale).unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    feet = [topk.foot(highest, scale) for highest in magnitudes[ends - 1].tolist()]
    n_below = torch.searchsorted(magnitudes, torch.tensor(feet))
    assert (n_below <= ends - counts).all()
    assert (n_below >= ends - counts - 2).all()


def test_stretch_begins_at_every_place_where_it_can() -> None:
    values = torch.tensor([5.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    begins = {
        tuple(sorted(select_largest(values, 3, "mstopk", generator=seeded(seed))[1].tolist())) for seed in range(60)
    }
    assert begins == {(0, 1, 2), (0, 2, 3), (0, 3, 4)}


@pytest.mark.parametrize("density", [0.43, 0.6, 0.9, 0.999])
def test_mstopk_finds_more_than_reach_the_mean(density: float) -> None:
    values = normal(100_000)
    assert (values.abs() >= values.abs().mean()).double().mean() < 0.43
    assert recall(values, int(density * values.numel()), "mstopk") >= 0.9999


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.6])
def test_dgc_misses_few(density: float) -> None:
    recalls = [recall(normal(200_000, seed=seed), int(density * 200_000), "dgc") for seed in range(5)]
    assert min(recalls) >= 0.99


@pytest.mark.parametrize("phase", range(6))  # dgc samples every sixth of these
def test_dgc_is_not_deceived_by_a_vector_that_its_sample_is_not_typical_of(phase: int) -> None:
    values = normal(10_000) / 100
    values[phase::6] += 10
    assert recall(values, 100, "dgc") == 1


def test_exact_misses_none() -> None:
    assert recall(normal(10_000), 123, "exact") == 1


@each_method
def test_none_of_a_vector_is_nothing(method: Method) -> None:
    selected(normal(10), 0, method)
    selected(torch.empty(0), 0, method)


@each_method
def test_all_of_a_vector_are_all(method: Method) -> None:
    values = normal(10)
    _, indices = selected(values, 10, method)
    assert sorted(indices.tolist()) == list(range(10))


@pytest.mark.parametrize("k", [1, 2, 500, 998, 999])
@pytest.mark.parametrize("constant", [0.0, 0.1, -1e30, 1e-40])  # the mean of many 0.1 is rounded, perhaps above 0.1
@each_method
def test_constant_vector_gives_any_k(method: Method, constant: float, k: int) -> None:
    selected(torch.full((1000,), constant), k, method)


@each_method
def test_few_nonzeros_are_among_the_k(method: Method) -> None:
    values = torch.zeros(10_000)  # as in the gradient of an embedding: more zeros than can be candidates
    values[[17, 4321, 9999]] = torch.tensor([1.0, -2.0, 3.0])
    _, indices = selected(values, 5, method)
    assert {17, 4321, 9999} <= set(indices.tolist())


@each_method
def test_ties_at_the_top_that_outnumber_k_are_cut(method: Method) -> None:
    values = torch.cat([torch.ones(600), torch.zeros(400)])[torch.randperm(1000, generator=seeded())]
    chosen, _ = selected(values, 100, method)
    assert chosen.tolist() == [1.0] * 100


def test_ties_are_cut_at_a_place_that_the_generator_chooses() -> None:
    values = torch.ones(1000)
    first, again, other = (
        select_largest(values, 10, "mstopk", generator=seeded(seed))[1].tolist() for seed in (0, 0, 1)
    )
    assert first == again != other


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@each_method
def test_not_finite_values_are_selected_first(method: Method, dtype: torch.dtype, bad: float) -> None:
    values = normal(1000, dtype=dtype)
    values[[3, 700]] = bad
    _, indices = selected(values, 10, method)
    assert {3, 700} <= set(indices.tolist())


@each_method
def test_nothing_but_nan_still_gives_k(method: Method) -> None:
    selected(torch.full((100,), math.nan), 7, method)


@pytest.mark.parametrize("dtype", DTYPES)
@each_method
def test_huge_numbers_do_not_overflow(method: Method, dtype: torch.dtype) -> None:
    values = torch.full((1000,), torch.finfo(dtype).max / 8, dtype=dtype)
    values[:500] /= 2
    _, indices = selected(values, 200, method)
    assert int(indices.min()) >= 500


@each_method
def test_large_halves_are_told_apart(method: Method) -> None:
    values = torch.full((1000,), 65504.0, dtype=torch.float16)
    values[:500] = 30000.0
    _, indices = selected(values, 200, method)
    assert int(indices.min()) >= 500


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    data=st.data(),
    method=st.sampled_from(METHODS),
    dtype=st.sampled_from(DTYPES),
)
def test_any_vector_gives_exactly_k(values: list[float], data: st.DataObject, method: Method, dtype: object) -> None:
    assert isinstance(dtype, torch.dtype)
    selected(torch.tensor(values).to(dtype), data.draw(st.integers(0, len(values))), method)


@pytest.mark.parametrize("k", [1, 10, 600])
@each_method
def test_selection_waits_for_no_values_but_the_cpu_s(method: Method, k: int) -> None:
    # the meta device has none to wait for: .item(), nonzero() and masks as indices fail there
    chosen, indices = select_largest(torch.empty(1000, device="meta"), k, method)
    assert chosen.shape == indices.shape == (k,)


@each_method
def test_vector_stays_as_it_is(method: Method) -> None:
    values = normal(1000)
    before = values.clone()
    selected(values, 10, method)
    assert torch.equal(values, before)


@pytest.mark.parametrize("k", [-1, 4])
def test_k_out_of_range_is_refused(k: int) -> None:
    with pytest.raises(RunError, match=f"k = {k} of 3 elements; must be from 0 to 3"):
        select_largest(torch.ones(3), k, "exact")


@pytest.mark.parametrize("values", [torch.ones(2, 2), torch.ones(3, dtype=torch.int32)])
def test_what_is_no_vector_of_floats_is_refused(values: Tensor) -> None:
    with pytest.raises(RunError, match="must be a floating-point vector"):
        select_largest(values, 1, "exact")


def test_more_than_int32_counts_is_refused() -> None:
    with pytest.raises(RunError, match="int32 indices reach 2147483647"):
        select_largest(torch.empty(2**31, device="meta"), 1, "exact")


@pytest.mark.parametrize("dtype", DTYPES)
def test_densify_replaces_and_adds_up_equal_indices(dtype: torch.dtype) -> None:
    out = torch.full((5,), 7.0, dtype=dtype)
    densify(torch.tensor([1, 2, 4], dtype=dtype), torch.tensor([4, 0, 4], dtype=torch.int32), out)
    assert out.tolist() == [2, 0, 0, 0, 5]


@each_method
def test_selected_and_rest_make_the_whole(method: Method) -> None:
    values = normal(1000)
    chosen, indices = selected(values, 100, method)
    sent, rest = torch.empty(1000), values.clone()
    densify(chosen, indices, sent)
    rest[indices.long()] = 0
    assert torch.equal(sent + rest, values)


@pytest.mark.full
def test_benchmark_says_what_it_measured() -> None:
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "topk.py"
    command = [sys.executable, script, "--quick", "--json", "--device", "cpu"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert [row["method"] for row in found["rows"]] == list(METHODS)
    for row in found["rows"]:
        assert row["size"] == 2 ** found["sizes"]["log2_sizes"][0]
        assert min(row["ms"], row["times_faster_than_topk"], row["reads"]) > 0
        assert row["recall"] >= 0.9
    assert found["targets"] == []  # which are for large sizes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False")
@pytest.mark.parametrize("dtype", DTYPES)
@each_method
def test_gpu_selects_as_well_and_its_host_never_waits(method: Method, dtype: torch.dtype) -> None:
    values = normal(20_000, dtype=dtype).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chosen, indices = select_largest(values, 200, method, generator=seeded())
        densify(chosen, indices, torch.empty_like(values))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kth = values.abs().sort(descending=True).values[199]
    assert indices.unique().numel() == 200
    assert float((chosen.abs() >= kth).double().mean()) >= 0.99
