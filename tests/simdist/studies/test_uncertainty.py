"""Ranges of what nobody measured, and the intervals of results that follow from them."""

import re

import numpy as np
import pytest
from commandline import call

from simdist import scenario
from simdist.errors import ScenarioError
from simdist.runs.building import build, price_of
from simdist.scenario import Range
from simdist.studies import comparison, draws, measuring, uncertainty
from simdist.studies.comparison import compare
from simdist.studies.facets import RANGES
from simdist.studies.uncertainty import causes, drawn, n_draws, places, quantities, spread

# Two nodes of one GPU each: a ring of two moves a gradient of 4 MB in two halves, nothing is hidden.
LINE = """\
cluster:
  nodes: 2
  gpus_per_node: 1
  fabric: ideal
  network: {{latency: 0 s, bandwidth: 1 GB/s, efficiency: 0.5}}
  uncertain:
    network.efficiency: {{from: 0.4, to: 0.95, source: reports, measure: busbw}}
workload: {{tensors: [{{name: a, count: 1000000}}], batch_size: 1, forward: 10 ms, backward: 0 s}}
steps: 20
{more}
schedules: [{{kind: sync, algorithm: ring}}, {{kind: local_sgd, period: 2, algorithm: ring}}]
"""
NOISE = "disturbances: [{kind: exponential, mean: 2 ms}]"


def line(more="", **changes):
    text = LINE.format(more=more)
    for old, new in changes.items():
        text = re.sub(rf"{old}: [^,}}\n]+", f"{old}: {new}", text)
    return scenario.loads(text, name="line.yaml")


def stated(text):
    """The same without ranges."""
    return scenario.loads(re.sub(r"  uncertain:\n.*\n", "", text))


def test_ends_are_those_of_the_closed_form():
    sync, local = compare(line(), n_seeds=1)
    exact = [0.01 + 0.004 / (0.4 + share * 0.55) for share in (0.95, 0.05)]
    assert sync.step_s == pytest.approx(0.01 + 0.004 / 0.5, rel=1e-12)
    assert sync.step_s_range == pytest.approx(exact, rel=1e-3)
    speedups = [time / (time - (time - 0.01) / 2) for time in exact]
    assert local.speedup_range == pytest.approx(speedups, rel=1e-3)
    assert sync.speedup_range == (1.0, 1.0)
    assert sync.of(RANGES) == pytest.approx({"cluster.network.efficiency": 1, "seeds": 0}, abs=5e-3)


def test_results_as_stated_are_the_same_to_the_last_bit():
    text = LINE.format(more=NOISE)
    pairs = zip(compare(scenario.loads(text), n_seeds=3), compare(stated(text), n_seeds=3), strict=True)
    for found, plain in pairs:
        document = found.document()
        ends = {name: document.pop(name) for name in ("step_s_range90", "speedup_range90", "shares")}
        assert document == plain.document()
        low_s, high_s = ends["step_s_range90"]
        assert low_s < plain.step_s < high_s
        assert not {*ends} & plain.document().keys()


def test_draws_are_the_same_for_all_schedules_and_every_time():
    noisy = line(NOISE)
    one, two = (compare(noisy, n_seeds=4) for _ in range(2))
    assert one == two
    measured = [comparison.measure_with_additions(noisy, build(noisy, each), n_seeds=4) for each in noisy.schedules]
    assert np.array_equal(*(each.drawn["cluster.network.efficiency"] for each in measured))
    # of a speed-up far less is open than of the times that it is made of
    sync, local = one
    (low, high), (low_s, high_s) = local.speedup_range, sync.step_s_range
    assert high / low - 1 < (high_s / low_s - 1) / 1.5


def test_both_engines_draw_alike():
    more = "disturbances.0.mean: {from: 1 ms, to: 3 ms}, workload.forward: {from: 9 ms, to: 12 ms}"
    noisy = line(f"{NOISE}\nuncertain: {{{more}}}")
    by_fast, by_des = (compare(noisy, n_seeds=3, engine=engine) for engine in ("fast", "des"))
    assert [each.engine for each in (*by_fast, *by_des)] == ["fast"] * 2 + ["des"] * 2
    for fast, des in zip(by_fast, by_des, strict=True):
        assert fast.step_s_range == pytest.approx(des.step_s_range, rel=1e-12)
        assert fast.speedup_range == pytest.approx(des.speedup_range, rel=1e-12)


def test_prices_side_by_side_are_those_of_each_alone():
    """Where groups share NICs, too: each of four streams of a torus."""
    torus = scenario.loads(
        "cluster: {preset: gcp-t4x4-32gbit, nodes: 4, uncertain: {network.efficiency: {from: 30%, to: 80%}}}\n"
        "workload: {preset: resnet18, forward: 20 ms, backward: 35 ms}\nsteps: 3\n"
        "schedules: [{kind: torus}, {kind: hierarchical_sgd, levels: {1: 4, 2: 16}}]"
    )
    for schedule in torus.schedules:
        built = build(torus, schedule)
        found = draws.with_draws(torus, built, measuring.measure(torus, built, n_seeds=1), doubts=())
        assert found.engine == "fast"
        (quantity,) = quantities(torus)
        for number in (0, 17, 19):
            at = places(quantity.name, seed=0, n=20)[number]
            alone = drawn(torus, {quantity: at})
            again = measuring.measure(alone, build(alone, schedule), n_seeds=1)
            assert found.drawn["step"][number] == again.step_s[0]
            assert price_of(built.plan, alone).capacity_Bps.max() > 0


@pytest.mark.parametrize("n_quantities", [1, 2, 3])
def test_intervals_hold_a_truth_drawn_from_the_ranges(n_quantities):
    """Step times that add up and multiply, of quantities and of chance; 90 % is stated."""
    generator, held, n, n_drawn = np.random.default_rng(3), 0, 400, n_draws(n_quantities)

    def result(at):
        return sum(1 / (0.4 + 0.55 * each) for each in at) * (1 + 0.3 * at[0])

    for seed in range(n):
        names = [f"{seed}.{number}" for number in range(n_quantities)]
        where = {name: places(name, seed=seed, n=n_drawn) for name in names}
        center, sigma = result([0.3] * n_quantities), 0.05
        seen = center + sigma * generator.standard_normal()
        chance = (seen - 1.96 * sigma, seen + 1.96 * sigma)
        truth = result(generator.random(n_quantities))
        (low, high), _ = spread(seen, result([*where.values()]) - center, chance, where)
        held += low <= truth <= high
    assert 0.87 <= held / n <= 0.95


def test_without_a_spread_only_chance_is_left():
    where = {"a": places("a", seed=0, n=40)}
    interval, shares = spread(10.0, np.zeros(40), (8.0, 12.5), where)
    factor = 1.25 ** (1.6449 / 1.96)  # from 95 % over seeds to 90 %
    assert interval == pytest.approx((10 / factor, 10 * factor), abs=0.07)
    assert shares == {"a": 0.0, "seeds": 1.0}
    assert causes(line(), {"local-4": shares}) == [
        "the largest part of the interval of local-4 (100 % of the variance) is from chance: simulate more --seeds"
    ]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_interval_of_changes_in_one_direction_begins_at_the_result(sign):
    where = {"a": places("a", seed=0, n=20)}
    (low, high), _ = spread(10.0, sign * (1 + where["a"]), None, where)
    near, far = sorted((low, high), key=lambda end: abs(end - 10.0))
    assert near == 10.0
    assert far == pytest.approx(10 + sign * 1.9)


def test_shares_are_those_of_a_sum():
    where = {name: places(name, seed=1, n=40) for name in "abc"}
    _, shares = spread(0.0, 3 * where["a"] + where["b"], None, where)
    assert shares == pytest.approx({"a": 0.9, "b": 0.1, "c": 0.0, "seeds": 0.0}, abs=1e-9)


def test_draws_take_every_part_of_a_range_once():
    drawn_places = places("cluster.network.efficiency", seed=3, n=40)
    assert np.array_equal(np.sort(drawn_places), (np.arange(40) + 0.5) / 40)
    assert not np.array_equal(drawn_places, places("cluster.network.efficiency", seed=4, n=40))
    assert not np.array_equal(drawn_places, places("cluster.network.latency", seed=3, n=40))


def test_the_sentence_names_range_source_and_measurement():
    (quantity,) = quantities(line())
    (sentence,) = causes(line(), {"sync": {quantity.name: 0.8, "seeds": 0.1}, "torus": {quantity.name: 0.6}})
    assert sentence == (
        "the largest part of the intervals of sync, torus (60 to 80 % of the variance) is from "
        "cluster.network.efficiency (0.4 to 0.95, reports): measure busbw"
    )


def test_a_scenario_overrides_the_ranges_of_its_cluster():
    (found,) = quantities(line("uncertain: {cluster.network.efficiency: {from: 0.45, to: 0.55}}"))
    assert found.ends == (0.45, 0.55)


def test_who_states_a_value_over_a_file_has_measured_it(tmp_path):
    cluster = line().cluster
    (tmp_path / "cluster.yaml").write_text(scenario.dump_cluster(cluster))
    rest = "workload: {preset: resnet18, forward: 1 ms}\nsteps: 2\nschedules: [{kind: sync}]\n"

    def ranges(override):
        text = f"cluster: {{file: cluster.yaml{override}}}\n{rest}"
        return [each.name for each in quantities(scenario.loads(text, folder=tmp_path))]

    assert ranges("") == ranges(", network: {bandwidth: 10 Gbit/s}") == ["cluster.network.efficiency"]
    assert ranges(", uncertain: {}") == []
    assert ranges(", uncertain: {network.latency: {from: 0 s, to: 1 us}}") == [
        "cluster.network.efficiency",
        "cluster.network.latency",
    ]
    assert ranges(", network: {efficiency: 0.2}") == ranges(", network: ideal") == []
    assert ranges(", network: {table: [{size: 1 B, time: 1 us}, {size: 1 MB, time: 1 ms}]}") == []


def test_ranges_are_written_and_read_again():
    ranges = {"network.bandwidth": Range(from_="4 Gbit/s", to="10 Gbit/s", source="data sheets")}
    changed = line().changed(cluster={**dict(line().cluster), "uncertain": ranges})
    assert scenario.loads(scenario.dump(changed)) == changed
    assert quantities(changed)[0].ends == (5e8, 1.25e9)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("network.efficiency: {from: 0.9, to: 0.4}", ".to: 0.4 is not above from, 0.9: write the larger one as to"),
        ("network.efficiency: {from: 0.6, to: 0.9}", ": network.efficiency is 0.5, outside 0.6 to 0.9: change one"),
        ("network.efficiency: {from: 0.4}", ".to: required key 'to' is missing"),
        ("network.efficiency: {from: 0, to: 0.9}", ".from: 0: write more than 0"),
        ("network.latency: {from: 1, to: 3 us}", ".from: 1: a time needs a unit: write e.g. 55 ms"),
        ("network.latency: {from: 0 s, to: 3 GB}", ".to: '3 GB': that is a size, not a time: write e.g. 55 ms"),
        ("network.bandwidth: {from: 1 MB/s, to: unlimited}", ".to: 'unlimited': write a finite value"),
        ("netwrk.latency: {from: 1 us, to: 3 us}", ": there is no key 'netwrk' in a cluster: did you mean 'network'?"),
        ("network: {from: 1 us, to: 3 us}", ": is not a measured number: write ranges of times, rates and shares"),
        (
            "collectives.library: {from: 1 us, to: 3 us}",
            ": is not a measured number: write ranges of times, rates and shares",
        ),
        ("nodes: {from: 1, to: 3}", ": is not a measured number: write ranges of times, rates and shares"),
        ("device.peak.fp16: {from: 1 TFLOP/s, to: 3 TFLOP/s}", ": is not stated: write it, too"),
        ("'no path!': {from: 1, to: 3}", ": 'no path!' is not a path: write e.g. cluster.nodes"),
        ("network.efficiency: 0.4", ": 0.4: not a mapping"),
    ],
)
def test_a_wrong_range_is_told_with_file_line_and_value(written, message):
    text = re.sub(r"network.efficiency: {from.*", written, LINE.format(more=""))
    path = written.split(":")[0].strip("'")
    with pytest.raises(ScenarioError) as refused:
        scenario.loads(text, name="line.yaml")
    assert str(refused.value).startswith(f"line.yaml:7: cluster.uncertain.{path}{message}")


def test_a_schedule_is_chosen_and_not_uncertain():
    with pytest.raises(ScenarioError, match=r"uncertain.schedules.1.period: is not a measured number"):
        line("uncertain: {schedules.1.period: {from: 1, to: 3}}")


def test_a_draw_that_changes_the_plan_is_built_again():
    """Fusion by time: which tensors are ready together follows from the backward pass."""
    text = (
        LINE.format(more="uncertain: {workload.backward: {from: 1 ms, to: 30 ms}}")
        .replace(
            "[{name: a, count: 1000000}]",
            "[{name: a, count: 400000}, {name: b, count: 300000}, {name: c, count: 300000}]",
        )
        .replace("backward: 0 s", "backward: 10 ms")
        .replace("{kind: sync, algorithm: ring}", "{kind: sync, algorithm: ring, fusion: {buffer: 64 MB, cycle: 5 ms}}")
    )
    found = scenario.loads(text)
    built = build(found, found.schedules[0])
    measured = draws.with_draws(found, built, measuring.measure(found, built, n_seeds=1))
    for number in (0, 5, 9):
        alone = drawn(found, {each: measured.drawn[each.name][number] for each in quantities(found)})
        again = measuring.measure(alone, build(alone, found.schedules[0]), n_seeds=1)
        assert measured.drawn["step"][number] == again.step_s[0]


def test_the_number_of_draws_is_what_the_interval_of_several_needs():
    """Between the outermost of n draws lies a further one with (n - 1) / (n + 1)."""
    n = n_draws(2)
    assert (n - 1) / (n + 1) > 1 - 2 * uncertainty.TAIL
    assert 1.5 / n_draws(1) > uncertainty.TAIL > 0.5 / n_draws(1)  # quantiles of evenly spaced draws lie between these


def test_one_quantity_without_chance_makes_all_of_an_interval_and_rounding_none():
    where = {"a": places("a", seed=0, n=20)}
    kink = np.maximum(where["a"] - 0.8, 0.0)
    assert spread(10.0, kink, (10.0, 10.0 + 1e-14), where)[1]["a"] == pytest.approx(1.0)
    assert spread(10.0, np.zeros(20), (10.0, 10.0 + 1e-14), where)[1] == {}


def test_a_table_has_no_efficiency_that_could_be_uncertain():
    table = "network: {table: [{size: 0 B, time: 10 us}, {size: 1 GB, time: 1 s}]}"
    text = re.sub(r"network: {[^}]*}", table, LINE.format(more=""))
    with pytest.raises(ScenarioError, match="network is a table of measured points, in which efficiency means nothing"):
        scenario.loads(text)


def test_a_sweep_computes_with_stated_values(tmp_path, capsys):
    (tmp_path / "line.yaml").write_text(LINE.format(more=""))
    (tmp_path / "sweep.yaml").write_text(
        "scenario: line.yaml\nvary: {cluster.network.efficiency: [30%, 50%]}\nseeds: 1\n"
    )
    assert call(capsys, "sweep", tmp_path / "sweep.yaml", "-o", tmp_path / "out").code == 0
