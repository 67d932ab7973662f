"""Delays of steps with several micro-batches: which of them each kind delays, and by how much."""

from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from simdist.errors import ScenarioError
from simdist.runs.building import delays
from simdist.scenario import loads, sampler
from simdist.scenario.disturbances import (
    Bursts,
    CustomDisturbance,
    Disturbance,
    Drawn,
    Draws,
    Exponential,
    HeavyTail,
    Interference,
    Jitter,
    Pauses,
    Persistent,
    Recorded,
    Transient,
    UnevenWork,
)
from simdist.scenario.pauses_and_work import Balance, dealt
from simdist.scenario.warnings import warnings_of
from simdist.testing import check_disturbance

K = 4
N_STEPS = 48
N_RANKS = 3
ONCE: tuple[Disturbance, ...] = (
    Transient(probability=0.5, delay_s=1.0),
    HeavyTail(scale_s=0.1, shape=1.5),
    Drawn(values=(0.0, 1.0, 2.0)),
    Pauses(every=(2, 5), delay_s=(1.0, 2.0)),
)
THROUGHOUT: tuple[Disturbance, ...] = (
    Persistent(factor=1.5, sets_in=(2, 6)),
    Persistent(delay_s=0.2, ranks=(1,)),
    Bursts(enter=0.2, leave=0.4, delay_s=1.0),
    Interference(lost=0.1),
)
EACH: tuple[Disturbance, ...] = (
    Jitter(median_s=0.1, sigma=0.5),
    Exponential(mean_s=0.1),
    UnevenWork(lengths=(1, 4)),
)


def drawn(
    disturbance: Disturbance, k: int = K, *, n_steps: int = N_STEPS, n_ranks: int = N_RANKS
) -> NDArray[np.float64]:
    """Return what two seeds draw, `[2, n_steps, k, n_ranks]`."""
    compute_s = np.full(n_ranks, 0.4)
    source = sampler(
        [disturbance], seeds=[3, 8], world_size=n_ranks, ranks_per_node=1, compute_s=compute_s, micro_batches=k
    )
    return source.take(n_steps)[disturbance.on].reshape(2, n_steps, k, n_ranks)


@pytest.mark.parametrize("disturbance", ONCE, ids=lambda each: each.kind)
def test_what_comes_once_in_a_step_falls_into_one_micro_batch(disturbance: Disturbance) -> None:
    """Steps are as late as with one micro-batch, to the last bit."""
    late_s = drawn(disturbance)
    assert ((late_s > 0).sum(axis=2) <= 1).all()
    np.testing.assert_array_equal(late_s.sum(axis=2), drawn(disturbance, 1)[:, :, 0])


def test_each_micro_batch_is_as_likely_as_any_other() -> None:
    late_s = drawn(Transient(probability=1.0, delay_s=1.0), n_steps=5_000)
    assert late_s.mean(axis=(0, 1)) == pytest.approx(np.full((K, N_RANKS), 1 / K), abs=0.02)


@pytest.mark.parametrize("disturbance", [Pauses(every=(3, 3), first=(2, 2), delay_s=(1.0, 2.0)), Drawn(values=(1.0,))])
def test_what_comes_at_a_fixed_time_falls_into_the_first_micro_batch(disturbance: Disturbance) -> None:
    """Ranks that pause in the same steps do so together, such as before an epoch."""
    late_s = drawn(disturbance)
    assert late_s[:, :, 0].any()
    assert not late_s[:, :, 1:].any()


@pytest.mark.parametrize("disturbance", THROUGHOUT, ids=lambda each: each.kind)
def test_what_lasts_a_step_is_spread_evenly(disturbance: Disturbance) -> None:
    late_s = drawn(disturbance)
    assert late_s.any()
    np.testing.assert_array_equal(late_s, np.broadcast_to(late_s[:, :, :1], late_s.shape))
    np.testing.assert_allclose(late_s.sum(axis=2), drawn(disturbance, 1)[:, :, 0], rtol=1e-14)


@pytest.mark.parametrize("disturbance", EACH, ids=lambda each: each.kind)
def test_noise_and_work_of_micro_batches_differ_and_have_the_mean_of_a_step(disturbance: Disturbance) -> None:
    late_s = drawn(disturbance, n_steps=4_000)
    assert late_s.sum(axis=2).mean() == pytest.approx(drawn(disturbance, 1, n_steps=4_000).mean(), rel=0.03)
    pairs = np.corrcoef(late_s.transpose(2, 0, 1, 3).reshape(K, -1))
    assert np.abs(pairs - np.eye(K)).max() < 0.03


def test_constant_jitter_makes_no_rank_wait() -> None:
    assert (drawn(Jitter(median_s=0.2, sigma=0.0)) == 0.2 / K).all()


@pytest.mark.parametrize("disturbance", [*ONCE, *THROUGHOUT, *EACH], ids=lambda each: each.kind)
def test_loads_are_delayed_step_by_step(disturbance: Disturbance) -> None:
    of_loads = disturbance.model_copy(update={"on": "io"})
    source = sampler([of_loads], seeds=[1], world_size=2, ranks_per_node=1, compute_s=np.ones(2), micro_batches=K)
    assert source.take(5)["io"].shape == (1, 5, 2)


@pytest.mark.parametrize("disturbance", [*ONCE, *THROUGHOUT, *EACH], ids=lambda each: each.kind)
def test_delays_of_micro_batches_keep_the_rules(disturbance: Disturbance) -> None:
    """Also in other chunks, in a longer run, and with other seeds."""
    check_disturbance(disturbance)


@pytest.mark.parametrize(("channel", "place"), [("compute", 0), ("host", K - 1), ("backward", K - 1)])
def test_a_recording_of_steps_delays_the_first_micro_batch_on_compute_and_the_last_otherwise(
    channel: Literal["compute", "host", "backward"], place: int
) -> None:
    table = 1.0 + np.arange(N_STEPS * N_RANKS).reshape(N_STEPS, N_RANKS)
    late_s = drawn(Recorded(on=channel, file=table))
    np.testing.assert_array_equal(late_s[0, :, place], table)
    assert late_s.sum() == 2 * table.sum()


def test_a_recording_of_micro_batches_is_played_as_it_is() -> None:
    table = np.arange(N_STEPS * K * N_RANKS, dtype=np.float64).reshape(N_STEPS, K, N_RANKS)
    late_s = drawn(Recorded(on="compute", file=table))
    np.testing.assert_array_equal(late_s[0], table)
    np.testing.assert_array_equal(drawn(Recorded(on="io", file=table), 1)[0, :, 0], table.sum(axis=1))


def test_ranks_and_blocks_of_steps_are_drawn_with_all_their_micro_batches() -> None:
    steps, parts, ranks = np.ogrid[:N_STEPS, :K, :2]
    table = 100.0 * steps + 10 * parts + ranks
    late_s = drawn(Recorded(file=table, resample_steps=7), n_ranks=5)
    assert (late_s // 10 % 10 == np.arange(K)[:, None]).all()
    assert (late_s // 100 == late_s[:, :, :1] // 100).all()
    assert (np.diff(late_s[0, :7, 0, 0]) % (100 * N_STEPS) == 100).all()


SCENARIO = """
cluster: {{nodes: 2, gpus_per_node: 1, fabric: ideal, network: ideal}}
workload: {{tensors: [{{name: all, count: 1000}}], batch_size: 1, forward: 40 ms, backward: 60 ms, micro_batches: {k}}}
disturbances: [{{kind: recorded, on: {channel}, file: {file}}}]
schedules: [sync]
steps: 5
"""


def test_a_recording_of_other_micro_batches_is_refused(tmp_path) -> None:
    file = tmp_path / "late.npz"
    np.savez(file, compute=np.ones((5, 4, 2)))
    assert delays(loads(SCENARIO.format(k=4, channel="compute", file=file)))["compute"].shape == (1, 5, 4, 2)
    for k in (1, 8):
        with pytest.raises(ScenarioError) as caught:
            loads(SCENARIO.format(k=k, channel="compute", file=file))
        assert str(caught.value).endswith(
            f"late.npz holds 4 micro-batches of each step, the workload has {k}: record as many, or their sum, a row "
            f"for each step"
        )


def test_a_row_for_each_micro_batch_is_played_as_a_step_with_a_remark(tmp_path) -> None:
    remark = (
        "disturbances[0]: late.csv holds 20 rows, 4 for each of 5 steps, and each row is played as a step: if a row is "
        "a micro-batch, write an npz [n_steps, micro_batches, ranks]"
    )
    file = tmp_path / "late.csv"
    for n_rows, k, channel in (
        (20, 4, "compute"),
        (20, 4, "backward"),
        (5, 4, "host"),
        (19, 4, "host"),
        (20, 2, "host"),
    ):
        np.savetxt(file, np.ones((n_rows, 2)), delimiter=",")
        scenario = loads(SCENARIO.format(k=k, channel=channel, file=file))
        assert (remark in warnings_of(scenario)) == ((n_rows, k) == (20, 4))
    np.savetxt(file, np.ones((5, 2)), delimiter=",")
    assert not any("late.csv" in each for each in warnings_of(loads(SCENARIO.format(k=1, channel="host", file=file))))


class EveryOther(CustomDisturbance):
    """Late in every second micro-batch."""

    kind: Literal["every other"] = "every other"

    def delays_s(self, draws: Draws) -> NDArray[np.float64]:
        return np.where(np.arange(draws.micro_batches) % 2, 0.1, 0.0).reshape(1, -1, 1, 1)


class Broken(EveryOther):
    """Returns too many micro-batches."""

    def delays_s(self, draws: Draws) -> NDArray[np.float64]:
        return np.zeros((1, draws.micro_batches + 1, 1, 1))


def test_a_disturbance_of_a_user_may_delay_single_micro_batches() -> None:
    assert drawn(EveryOther())[0, 0, :, 0].tolist() == [0.0, 0.1, 0.0, 0.1]
    with pytest.raises(ScenarioError, match=r"broadcast to \[48, 4, 3, 2\], steps, micro-batches, ranks and seeds"):
        drawn(Broken())


# ---------------------------------------------------------------- lengths dealt to ranks


def test_dealing_by_hand() -> None:
    """Two micro-batches of three ranks."""
    work = np.array([[1.0, 9.0, 2.0], [8.0, 3.0, 4.0]]).reshape(1, 2, 3, 1)
    by_hand: dict[Balance, list[list[float]]] = {
        "sorted": [[8, 9, 4], [1, 3, 2]],
        "round_robin": [[9, 8, 4], [3, 2, 1]],
        "greedy": [[9, 8, 4], [1, 2, 3]],
    }
    for balance, expected in by_hand.items():
        assert dealt(work, balance)[0, :, :, 0].tolist() == expected


@pytest.mark.parametrize("balance", ["sorted", "round_robin", "greedy"])
def test_dealing_keeps_the_lengths_of_each_step(balance: Balance) -> None:
    plain, again = (drawn(UnevenWork(lengths=(1, 50), quadratic=0.2, balance=each)) for each in (None, balance))
    assert not np.array_equal(plain, again)
    of_steps = [np.sort(each.reshape(2, N_STEPS, -1), axis=2) for each in (plain, again)]
    np.testing.assert_array_equal(*of_steps)


def test_what_dealing_gains_depends_on_where_ranks_meet() -> None:
    """With micro-batches of similar length, sharded ranks wait least; their sums then are nearly equal, too."""
    sums, meetings = {}, {}
    for balance in (None, "sorted", "round_robin", "greedy"):
        late_s = drawn(UnevenWork(lengths=(1, 4), balance=balance), 8, n_ranks=16)
        sums[balance] = late_s.sum(axis=2).max(axis=2).mean()
        meetings[balance] = late_s.max(axis=3).sum(axis=2).mean()
    assert sums["greedy"] < sums["round_robin"] < sums["sorted"] == sums[None]
    assert meetings["greedy"] == meetings["round_robin"] < meetings["sorted"] < meetings[None]
