"""Delays: the same numbers whatever else is asked for, and the distributions that the settings name."""

import math
import os

import numpy as np
import pytest
from pydantic import ValidationError

from simdist.errors import ScenarioError
from simdist.scenario import (
    Bursts,
    Exponential,
    HeavyTail,
    Interference,
    Jitter,
    Pauses,
    Persistent,
    Recorded,
    Transient,
    UnevenWork,
    sampler,
    sampling,
)

RANDOM = [
    Transient(probability=0.3, delay_s=1.0),
    Jitter(median_s=0.01, sigma=0.5),
    Exponential(mean_s=0.02),
    HeavyTail(scale_s=0.01, shape=2.5),
    HeavyTail(scale_s=0.01, shape=2.5, probability=0.1),
    Bursts(enter=0.05, leave=0.2, delay_s=0.5),
    Interference(lost=0.1, on="host"),
]
NOW_AND_THEN = [
    Pauses(every=(3, 9), delay_s=(0.1, 0.3), covered_s=(0.0, 0.2)),
    UnevenWork(lengths=(2, 9), quadratic=0.3, on="host"),
]
ALL = [
    *RANDOM,
    *NOW_AND_THEN,
    Persistent(delay_s=0.1, nodes=(0,)),
    Persistent(factor=1.5, ranks=(1, 2), on="compute"),
    Persistent(delay_s=0.1, sets_in=(5, 30)),
]


def draw_host(disturbance, n_steps=40, world_size=8, seed=1):
    return draw_all([disturbance], n_steps, world_size, seed)[disturbance.on]


def draw_all(disturbances, n_steps=40, world_size=8, seed=1):
    return {channel: s[0] for channel, s in make_sampler(disturbances, [seed], world_size).take(n_steps).items()}


def make_sampler(disturbances, seeds, world_size=8):
    return sampler(
        disturbances, seeds=seeds, world_size=world_size, ranks_per_node=4, compute_s=np.full(world_size, 0.2)
    )


@pytest.mark.parametrize("disturbance", [*RANDOM, *NOW_AND_THEN], ids=lambda disturbance: disturbance.kind)
def test_longer_run_keeps_the_earlier_numbers(disturbance):
    assert np.array_equal(draw_host(disturbance, n_steps=70)[:33], draw_host(disturbance, n_steps=33))


@pytest.mark.parametrize("disturbance", [*RANDOM, *NOW_AND_THEN], ids=lambda disturbance: disturbance.kind)
def test_larger_world_keeps_the_numbers_of_its_first_ranks(disturbance):
    assert np.array_equal(draw_host(disturbance, world_size=36)[:, :8], draw_host(disturbance, world_size=8))


@pytest.mark.parametrize("chunks", [[1] * 50, [7, 16, 27], [50], [0, 16, 34]])
def test_chunks_do_not_change_any_number(chunks):
    whole = make_sampler(ALL, [3, 4]).take(50)
    chunked = make_sampler(ALL, [3, 4])
    parts = [chunked.take(n_steps) for n_steps in chunks]
    assert whole.keys() == {"host", "compute"} == chunked.channels
    for channel, delays in whole.items():
        assert delays.shape == (2, 50, 8)
        assert np.array_equal(np.concatenate([part[channel] for part in parts], axis=1), delays)


def test_batches_do_not_change_any_number():
    small, large = make_sampler(RANDOM, [5]), make_sampler(RANDOM, range(5, 15), world_size=1000)
    assert np.array_equal(small.take(40)["host"][0], large.take(40)["host"][0, :, :8])


def test_seed_has_its_numbers_whichever_seeds_stand_beside_it():
    delays = make_sampler(RANDOM, [9, 3]).take(40)["host"]
    assert np.array_equal(delays[1], draw_all(RANDOM, seed=3)["host"])


def test_one_more_disturbance_at_the_end_keeps_the_numbers_of_the_others():
    more = [Transient(probability=0.3, delay_s=1.0), Exponential(mean_s=1.0, on="io")]
    assert np.array_equal(draw_all(more)["host"], draw_all(more[:1])["host"])


@pytest.mark.parametrize("disturbance", RANDOM, ids=lambda disturbance: disturbance.kind)
def test_seeds_ranks_and_places_in_the_list_are_independent(disturbance):
    one = draw_host(disturbance, n_steps=4000, seed=1)
    other = draw_host(disturbance, n_steps=4000, seed=2)
    second = draw_all([Persistent(delay_s=0.0), disturbance], n_steps=4000, seed=1)["host"]
    bound = 0.2 if isinstance(disturbance, Bursts) else 0.1  # bursts: 4000 steps hold fewer independent numbers
    for x, y in [(one[:, 0], other[:, 0]), (one[:, 0], one[:, 1]), (one[:, 0], second[:, 0])]:
        assert abs(np.corrcoef(x, y)[0, 1]) < bound
    if not isinstance(disturbance, Bursts):
        assert abs(np.corrcoef(one[1:, 0], one[:-1, 0])[0, 1]) < bound


@pytest.mark.parametrize(
    ("disturbance", "mean", "std"),
    [
        (Transient(probability=0.3, delay_s=2.0), 0.6, 2 * math.sqrt(0.21)),
        (
            Jitter(median_s=0.01, sigma=0.5),
            0.01 * math.exp(0.125),
            0.01 * math.exp(0.125) * math.sqrt(math.exp(0.25) - 1),
        ),
        (Exponential(mean_s=0.02), 0.02, 0.02),
        (HeavyTail(scale_s=0.01, shape=5), 0.0125, 0.01 * math.sqrt(5 / (16 * 3))),
        (Bursts(enter=0.05, leave=0.2, delay_s=0.5), 0.1, 0.2),
        (Interference(lost=0.1, noise=0.4, on="host"), 0.012 + 0.008 / (25 / 12), 0.008 / (25 / 12)),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_delays_have_the_mean_and_spread_of_their_distribution(disturbance, mean, std):
    delays = draw_host(disturbance, n_steps=1000, world_size=200)
    assert delays.mean() == pytest.approx(mean, rel=0.03)
    assert delays.std() == pytest.approx(std, rel=0.05)


def test_jitter_has_its_median():
    assert np.median(draw_host(Jitter(median_s=0.01, sigma=2.0), 1000, 100)) == pytest.approx(0.01, rel=0.03)


def test_heavy_tail_never_delays_by_less_than_its_scale():
    delays = draw_host(HeavyTail(scale_s=0.01, shape=1.5, probability=0.1), 1000, 100)
    assert np.count_nonzero(delays) / delays.size == pytest.approx(0.1, rel=0.05)
    assert delays[delays > 0].min() >= 0.01
    assert np.mean(delays[delays > 0] > 0.02) == pytest.approx(2**-1.5, rel=0.05)


def test_bursts_start_stationary_and_last_as_long_as_they_should():
    on = draw_host(Bursts(enter=0.02, leave=0.1, delay_s=1.0), 500, 2000) > 0
    assert on[0].mean() == pytest.approx(1 / 6, rel=0.15)
    assert on[-1].mean() == pytest.approx(1 / 6, rel=0.15)
    left = on[:-1] & ~on[1:]
    assert left.sum() / on[:-1].sum() == pytest.approx(0.1, rel=0.05)


def test_persistent_delays_its_ranks_in_every_step():
    assert np.array_equal(draw_host(Persistent(delay_s=0.1, ranks=(1, 3)), 2, 4), [[0, 0.1, 0, 0.1]] * 2)
    assert np.array_equal(draw_host(Persistent(delay_s=0.1, nodes=(1,)), 2, 8), [[0] * 4 + [0.1] * 4] * 2)


def test_factor_stretches_each_ranks_own_compute():
    compute_s = np.array([1.0, 2.0, 3.0, 4.0])
    late = sampler([Persistent(factor=1.5)], seeds=[0], world_size=4, ranks_per_node=4, compute_s=compute_s).take(2)
    assert late["host"].tolist() == [[[0.5, 1.0, 1.5, 2.0]] * 2]


def test_disturbances_of_a_channel_add_up():
    both = draw_all(
        [Persistent(delay_s=0.25), Persistent(delay_s=0.5, ranks=(0,)), Persistent(delay_s=2, on="io")], 1, 2
    )
    assert {channel: delays.tolist() for channel, delays in both.items()} == {
        "host": [[0.75, 0.25]],
        "io": [[2.0, 2.0]],
    }


def test_without_disturbances_there_are_no_channels():
    assert make_sampler([], [0]).channels == frozenset()
    assert draw_all([]) == {}


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_recording_is_played_as_it_is(tmp_path, suffix):
    seconds = np.random.default_rng(0).random((40, 8))
    file = tmp_path / f"delays{suffix}"
    if suffix == ".csv":
        file.write_text("# seconds\n" + "\n".join(",".join(map(repr, row)) for row in seconds.tolist()))
    else:
        np.savez(file, seconds)
    recorded = Recorded(file=file)
    assert np.array_equal(draw_host(recorded, 40), seconds)
    only = draw_host(Recorded(file=file, ranks=(2,)), 40)
    assert np.array_equal(only[:, 2], seconds[:, 2])
    assert np.count_nonzero(only) == 40
    with pytest.raises(ScenarioError, match="ends before step 41"):
        draw_host(recorded, 41)


def test_recording_of_several_channels_gives_its_own(tmp_path):
    np.savez(tmp_path / "delays.npz", host=np.ones((2, 8)), io=np.full((2, 8), 3.0))
    assert draw_host(Recorded(file=tmp_path / "delays.npz", on="io"), 2).max() == 3.0
    with pytest.raises(ValidationError, match="holds host, io: write one array, or one named 'compute'"):
        Recorded(file=tmp_path / "delays.npz", on="compute")


CSV = "write lines of numbers in seconds, one per step, one column per rank, separated by commas; begin a header with #"
LOG = "write columns step, rank and seconds, or ms"
NPZ = "write seconds, [n_steps, world_size], with numpy.savez(file, seconds)"


def test_recording_of_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValidationError, match=r"is not a recording: write the name of a \.npz or \.csv file"):
        Recorded(file=tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"1,2\n3", f"x.csv: the number of columns changed from 2 to 1 at row 2: {CSV}"),
        ("x.csv", b"", f"x.csv: is empty: {CSV}"),
        ("x.csv", b"# step,rank\n\n", f"x.csv: is empty: {LOG}"),
        ("x.csv", b"a,b\n1,2", f"x.csv: could not convert string 'a' to float64 at row 0, column 1: {CSV}"),
        ("x.csv", b"# s\n1,2\n1,x", f"x.csv: could not convert string 'x' to float64 at row 1, column 2: {CSV}"),
        ("x.csv", b"1;2", f"x.csv: could not convert string '1;2' to float64 at row 0, column 1: {CSV}"),
        ("x.csv", b"1,2,\n", f"x.csv: could not convert string '' to float64 at row 0, column 3: {CSV}"),
        ("x.csv", b"50 ms, 0", f"x.csv: could not convert string '50 ms' to float64 at row 0, column 1: {CSV}"),
        ("x.csv", b"1,2\n3,-4", "x.csv: -4 at step 1, rank 1: delays are seconds, finite and 0 or more"),
        ("x.csv", b"1,2\n3,inf", "x.csv: inf at step 1, rank 1: delays are seconds, finite and 0 or more"),
        (
            "x.csv",
            b"1,2\n3,1e300",
            "x.csv: 1e+300 at step 1, rank 1: delays are seconds, finite and 0 or more, at most 1e+",
        ),
        ("x.csv", b"1,nan", "x.csv: nan at step 0, rank 1: delays are seconds"),
        (
            "x.csv",
            b"1,2\n\xff",
            "x.csv: 'utf-8' codec can't decode byte 0xff in position 4: invalid start byte: ",
        ),
        ("x.csv", b"step,rank,ms\n0,0\n", f"x.csv: 3 columns in the header, and 2 below it: {LOG}"),
        (
            "x.csv",
            b"step,rank,ms\n0,0,x\n",
            f"x.csv: could not convert string 'x' to float64 at row 0, column 3: {LOG}",
        ),
        ("x.npz", b"", f"x.npz: is empty: {NPZ}"),
        ("x.npz", b"PK no zip", f"x.npz: is no .npz file: {NPZ}"),
        ("missing.csv", None, "missing.csv: there is no such file; the name is relative to the scenario"),
        ("missing.npz", None, "missing.npz: there is no such file"),
    ],
)
def test_damaged_recording_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert_refused(tmp_path / name, message)


def assert_refused(file, message):
    with pytest.raises(ValidationError) as caught:
        Recorded(file=file)
    (fault,) = caught.value.errors()
    assert fault["loc"] == ("file",)
    assert fault["msg"].removeprefix(f"{file.parent}{os.sep}").startswith(message), fault["msg"]
    for jargon in ("Errno", "pickle", "dtype"):
        assert jargon not in fault["msg"]


def test_a_log_with_a_gap_is_refused_with_the_remedy_for_logs_alone(tmp_path):
    (tmp_path / "x.csv").write_text("step,rank,ms\n0,0,1\n2,0,1\n")
    with pytest.raises(ValidationError) as caught:
        Recorded(file=tmp_path / "x.csv")
    assert caught.value.errors()[0]["msg"].endswith(
        "step 1 of rank 0 is missing: write one row for each step and rank, also of 0 s"
    )


def test_recording_from_a_spreadsheet_begins_with_a_mark_that_is_no_number(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbf1, 2\r\n3, 4\r\n")
    assert draw_host(Recorded(file=tmp_path / "x.csv"), 2, 2).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([[print]], dtype=object), "x.npz: arr_0 is damaged, or holds Python objects instead of numbers"),
        (np.array([["a"]]), "x.npz: arr_0 holds <U1 of shape [1, 1]"),
        (np.zeros(8), "x.npz: arr_0 holds float64 of shape [8]"),
        (np.array([[1.0, 2.0], [3.0, -4.0]]), "x.npz: -4 at step 1, rank 1: delays are seconds, finite and 0"),
    ],
    ids=["objects, which are not unpickled", "text", "one dimension", "negative"],
)
def test_array_of_something_else_is_refused(tmp_path, array, message):
    np.savez(tmp_path / "x.npz", array)
    assert_refused(tmp_path / "x.npz", message)


@pytest.mark.parametrize("name", ["x.csv", "x.npz"])
def test_what_is_no_file_is_refused_without_opening_it(tmp_path, name):
    (tmp_path / name).mkdir()
    assert_refused(tmp_path / name, f"{name}: is a directory: write the name of a .npz or .csv file")
    (tmp_path / name).rmdir()
    os.mkfifo(tmp_path / name)
    assert_refused(tmp_path / name, f"{name}: is no regular file")


def test_bits_stay_the_same():
    found = [float(draw_host(disturbance, 20, 3, seed=2024)[17, 2]).hex() for disturbance in RANDOM[1:4]]
    rows = draw_host(Transient(probability=0.5, delay_s=1.0), 2, 16, seed=2024)
    bursts = draw_host(Bursts(enter=0.3, leave=0.3, delay_s=1.0), 2, 16, seed=2024)
    patterns = ["".join(str(int(delay)) for delay in row) for row in [*rows, *bursts]]
    assert (found, patterns) == GOLDEN


GOLDEN = (
    ["0x1.5b094d219c492p-6", "0x1.69ba172453e56p-10", "0x1.50d95f82130fcp-7"],
    ["0101101001111100", "0111010000010100", "0101101001111100", "0111001001010100"],
)


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("world_size", [4, 64])
def test_interference_costs_a_machine_what_is_lost_and_more_machines_the_longest_of_more_delays(noise, world_size):
    delays = draw_all([Interference(lost=0.1, noise=noise)], n_steps=4000, world_size=world_size)["compute"]
    harmonic = {n: sum(1 / i for i in range(1, n + 1)) for n in (4, 64)}
    expected = 0.1 * 0.2 * (1 - noise + noise * harmonic[world_size] / harmonic[4])
    assert delays.max(axis=1).mean() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "settings", [{}, {"lost": 0.1, "machine_samples_per_s": 100.0}, {"lost": 0.1, "typical": True}]
)
def test_interference_is_either_stated_or_measured(settings):
    with pytest.raises(ValidationError, match=r"write either lost, e\.g\. 5%, or machine_samples_per_s"):
        Interference(**settings)


@pytest.mark.parametrize("ranks", [(0,), (7,), (2, 6), (3, 4)])
def test_some_ranks_have_the_numbers_that_they_have_among_all(ranks):
    everyone = draw_host(Jitter(median_s=0.01, sigma=0.5))
    some = draw_host(Jitter(median_s=0.01, sigma=0.5, ranks=ranks))
    np.testing.assert_array_equal(some[:, ranks], everyone[:, ranks])
    assert not np.delete(some, ranks, axis=1).any()


def test_few_ranks_take_as_many_words_in_a_larger_world(monkeypatch):
    """Words are drawn at `random_raw`."""
    drawn = []

    class Counting(np.random.Philox):
        def random_raw(self, size, output=True):  # type: ignore[override]
            drawn.append(size)
            return super().random_raw(size, output)

    monkeypatch.setattr(sampling, "Philox", Counting)
    n_words = []
    for world_size in (64, 128):
        drawn.clear()
        draw_host(Pauses(every=(3, 9), delay_s=(0.1, 0.3), ranks=(40, 43)), world_size=world_size)
        n_words.append(sum(drawn))
    assert n_words[0] == n_words[1] > 0
