"""A verdict never names a schedule that breaks a limit."""

import json
from unittest.mock import Mock

import pytest
from commandline import call, edited, write

from simdist.errors import ScenarioError
from simdist.scenario import loads
from simdist.schedules import Schedule
from simdist.tuning import Constraints, Extras, TuneOptions, tune
from simdist.tuning.candidates import schedule_of
from simdist.tuning.racing import simulate_entrants
from simdist.tuning.space import space
from simdist.tuning.tuning import usual_global_every
from simdist.tuning.verdict import named, staying

BLOCKS = ", ".join(f"{{name: h.{number}.weight, count: 100000}}" for number in range(8))
TEXT = f"""\
cluster:
  nodes: 2
  gpus_per_node: 4
  fabric: ideal
  network: {{latency: 25 us, bandwidth: 25 Gbit/s}}
workload: {{tensors: [{BLOCKS}], batch_size: 32, sample_size: 1 kB, forward: 20 ms, activation_size: 0 B}}
steps: 12
schedules: [sync]
"""
NBYTES = 3_200_000  # of the parameters; sync needs three times as much
SHARDING = Extras(only=("sync", "fsdp", "hsdp"), allow=("sharding",))
STORED = ("25 Gbit/s}\n", "25 Gbit/s}\n  storage: {latency: 1 ms, bandwidth: 1 GB/s}\n")
READ = ("steps: 12\n", "steps: 12\ninput: {source: storage, prefetch: 8}\n")


def tuned(constraints, extras=None, *, schedules=("sync",), edits=()):
    scenario = loads(edited(*edits, text=TEXT)).changed(schedules=list(schedules))
    return tune(scenario, TuneOptions(constraints, extras or Extras()))


def settings(schedule: Schedule, *names: str) -> tuple[object, ...]:
    return tuple(getattr(schedule, name) for name in names)


@pytest.mark.parametrize(
    ("constraints", "options", "breaks"),
    [
        (Constraints(1, memory_nbytes=NBYTES), {"extras": SHARDING}, "sync breaks --memory '3.2 MB': it needs 9.6 MB"),
        (Constraints(1, max_nbytes=4e6), {}, "sync breaks --max-bytes '4 MB': it needs 5.6 MB"),
        (Constraints(4), {"schedules": ["local-12"]}, "local-12 breaks --global-every 4: it exchanges every 12 steps"),
        (
            Constraints(4, ((2, 3),)),
            {"schedules": ["local-4"]},
            "local-4 breaks --group-every 2:3: it exchanges every 4",
        ),
        (
            Constraints(1, host_memory_nbytes=100_000),
            {"extras": Extras(only=("sync",)), "edits": (STORED, READ)},
            "sync breaks --host-memory '100 kB': it needs 256 kB",
        ),
    ],
)
def test_the_best_that_keeps_to_a_limit_replaces_a_baseline_that_breaks_it(constraints, options, breaks):
    """Also if it is no faster: a schedule that breaks a limit is no alternative."""
    found = tuned(constraints, **options)
    winner = found.verdict.winner
    assert found.verdict.outcome == "change"
    assert found.verdict.sentence.startswith(f"{breaks}")
    assert f"; the best that keeps to all limits is {named(winner.schedule)}, " in found.verdict.sentence
    (baseline,) = (each for each in found.finalists if each.is_baseline)
    assert baseline.breaches
    assert not baseline.on_front
    assert not any(each.breaches for each in found.finalists if each is not baseline)


@pytest.mark.parametrize(
    ("constraints", "extras", "sentence"),
    [
        (Constraints(1, memory_nbytes=2e6), SHARDING, "--memory '2 MB': fsdp comes nearest, it needs 2.35 MB, 350 kB"),
        (
            Constraints(1, max_nbytes=1e6),
            Extras(),
            "--max-bytes '1 MB': torus-1MiB comes nearest, it needs 3.2 MB, 2.2",
        ),
        (Constraints(4, ((16, 4),)), Extras(), "--group-every 16:4: none ever exchanges so"),
    ],
)
def test_if_nothing_keeps_to_the_limits_the_nearest_is_named_and_how_far_it_is(constraints, extras, sentence):
    found = tuned(constraints, extras)
    assert (found.verdict.outcome, found.verdict.winner) == ("none", None)
    assert found.verdict.sentence.startswith(f"no schedule keeps to {sentence}")
    assert found.verdict.best.breaches
    assert not any(each.on_front for each in found.finalists)


def test_the_own_schedule_may_come_nearest():
    """Nothing else is tried that needs as little: it appears once."""
    found = tuned(Constraints(1, memory_nbytes=2e6), SHARDING, schedules=["fsdp"])
    assert found.verdict.sentence.startswith("no schedule keeps to --memory '2 MB': fsdp comes nearest")
    assert [each.schedule.name for each in found.finalists] == ["fsdp"]


def test_a_baseline_that_alone_keeps_to_the_limits_stays():
    found = tuned(Constraints(1, memory_nbytes=4e6), Extras(only=("sync",)), schedules=["fsdp"])
    assert found.verdict.sentence == "stay with fsdp"
    assert "no other candidate keeps to the constraints" in found.verdict.reasons
    assert [each.schedule.name for each in found.finalists] == ["fsdp"]


def test_a_search_by_time_to_a_target_has_nothing_to_train_if_nothing_keeps_to_the_limits():
    scenario = loads(TEXT)
    wanted = TuneOptions(Constraints(1, max_nbytes=1e6))
    with pytest.raises(ScenarioError, match=r"no schedule keeps to --max-bytes '1 MB': torus-1MiB comes nearest"):
        simulate_entrants(scenario, wanted, None, Mock(progress=None), [1.0])


def test_the_document_names_what_each_schedule_breaks(capsys, tmp_path):
    file = write(tmp_path / "job.yaml", TEXT)
    for limit, outcome, breaks in (("4 MB", "change", 1), ("1 MB", "none", 2)):
        answer = call(capsys, "tune", file, "--json", "--only", "torus", "--max-bytes", limit, "--global-every", 1)
        document = json.loads(answer.out)
        assert (document["outcome"], document["change"]) == (outcome, outcome == "change")
        assert [row["breaks"] for row in document["rows"] if row["breaks"]] == [[f"--max-bytes '{limit}'"]] * breaks
        assert limit in document["verdict"]


@pytest.mark.parametrize(
    ("stated", "hint"),
    [
        ("", "workload.activation_size, their bytes per sample"),
        (", recompute: 30%", "workload.activation_size, .* and kept_activation_size, because recompute of 30% "),
    ],
)
def test_a_limit_on_memory_of_which_a_part_is_not_counted_is_refused(stated, hint):
    edits = [(", activation_size: 0 B", stated)]
    with pytest.raises(ScenarioError, match=rf"--memory '3.2 MB': memory is counted without activations: write {hint}"):
        tuned(Constraints(1, memory_nbytes=NBYTES), SHARDING, edits=edits)
    assert tuned(Constraints(1), Extras(only=("sync",)), edits=edits).verdict.outcome in ("stay", "change")


@pytest.mark.parametrize("first", ["hsdp", "fsdp"])
def test_candidates_that_shard_the_model_have_the_types_of_the_first_schedule_that_does(first):
    """Whichever comes first, both kinds are tried. Labels tell only what differs."""
    own = {"kind": first, "param_dtype": "bfloat16", "reduce_dtype": "float32", "wrap": "blocks", "communicators": 2}
    scenario = loads(TEXT).changed(schedules=[own | ({"shard": 2} if first == "hsdp" else {})])
    found = [schedule_of(each) for each in space(scenario, Constraints(1), SHARDING).candidates]
    sharded = [each for each in found if each.shards]
    assert {each.kind for each in sharded} == {"fsdp", "hsdp"}
    assert {settings(each, "param_dtype", "reduce_dtype", "communicators") for each in sharded} == {
        ("bfloat16", "float32", 2)
    }
    names = [each.name for each in found]
    assert len(set(names)) == len(names)
    assert "fsdp-bfloat16-root-2-comms" in names
    assert not any("reduce_dtype" in name for name in names)


def test_half_precision_is_gathered_where_the_arithmetic_has_it_and_nothing_else_is_stated():
    mixed = edited(("forward: 20 ms", "precision: bf16, forward: 20 ms"), text=TEXT)
    for text, types in ((TEXT, {None}), (mixed, {None, "bfloat16"})):
        found = [schedule_of(each) for each in space(loads(text), Constraints(1), SHARDING).candidates]
        sent = {settings(each, "param_dtype", "reduce_dtype") for each in found if each.shards}
        assert {param_dtype for param_dtype, _ in sent} == types
        assert {reduce_dtype for param_dtype, reduce_dtype in sent if param_dtype} <= {"float32"}


def test_candidates_keep_settings_of_the_own_schedule_that_no_search_varies():
    own = {"kind": "local_sgd", "period": 4, "warmup_steps": 2, "synchronize": False}
    scenario = loads(TEXT).changed(schedules=[own])
    found = [schedule_of(each) for each in space(scenario, Constraints(4), Extras(only=("local_sgd",))).candidates]
    assert {settings(each, "warmup_steps", "synchronize") for each in found} == {(2, False)}
    assert len({settings(each, "period") for each in found}) > 1


@pytest.mark.parametrize(("schedule", "steps"), [("sync", 8), ("local-4", 8), ("diloco-12", 12)])
def test_without_a_limit_on_global_exchanges_it_is_that_of_the_own_schedule_or_8(schedule, steps):
    scenario = loads(TEXT).changed(schedules=[schedule])
    assert usual_global_every(scenario, None) == steps
    assert usual_global_every(scenario.changed(steps=5), None) == 5


@pytest.mark.parametrize(
    ("speedup", "interval", "outcome"),
    [
        (1.0, None, "stay"),
        (1.01, (1.0, 1.015), "stay"),
        (1.01, (0.8, 1.3), "unsure"),
        (1.0, (0.97, 1.03), "unsure"),
        (1.05, (0.9, 1.2), "unsure"),
    ],
)
def test_a_wide_interval_leaves_open_whether_to_stay(speedup, interval, outcome):
    found, sentence = staying("sync", speedup, interval)
    assert (found, sentence.startswith("stay with sync")) == (outcome, True)
    assert ("until something is surely faster" in sentence) == (outcome == "unsure")
