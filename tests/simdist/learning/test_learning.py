"""`simdist learn`, with curves whose answers are known: values and times put together."""

import json
import math

import learners
import numpy as np
import pytest
from commandline import SMALL, call, edited, write
from engine_runs import simulate

from simdist.learning import training
from simdist.learning.curves import parse_target
from simdist.plan.walk import drops_late
from simdist.runs.building import build, delays
from simdist.scenario import load
from simdist.scenario.sampling import run_seeds
from simdist.studies.comparison import compare
from simdist.traces.waiting import step_end_s

TAUS = {"sync": 12.0, "local-4": 16.0, "hsgd-2-4,4-world": 200.0}
TARGET = "accuracy >= 0.9"
NEVER = "never got there in 60 steps, so not ranked: hsgd-2-4,4-world (5 of 5 runs)"


@pytest.fixture(autouse=True)
def _learner(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "_COMMAND", learners.COMMAND)
    monkeypatch.setenv("LEARNER_TAU", json.dumps(TAUS))
    monkeypatch.setenv("LEARNER_LOG", str(tmp_path / "log"))


@pytest.fixture
def scenario(tmp_path):
    return write(tmp_path / "job.yaml", edited(("steps: 12", "steps: 60")))


@pytest.fixture
def learn(capsys):
    def run(scenario, folder, *options, task="toy", target=TARGET):
        where = ["--workers", "0", "-o", folder, "--target", target]
        return call(capsys, "learn", scenario, "--task", task, *where, *options)

    return run


def trained(folder):
    return [json.loads(line) for line in (folder.parent / "log").read_text().splitlines()]


def steps_to(tau, value, every):
    """Solve 1 - exp(-n / tau) >= value for the first evaluation n."""
    return math.ceil(-tau * math.log(1 - value) / every) * every


def test_steps_and_seconds_to_the_target_are_those_of_curves_and_traces(learn, scenario, tmp_path):
    answer = learn(scenario, tmp_path / "d", "--json")
    assert answer.code == 0, answer.err
    document, job = json.loads(answer.out), load(scenario)
    found_s = {}
    for row, schedule in zip(document["rows"][:2], job.schedules[:2], strict=True):
        seeds = run_seeds(job.seed, 5)
        steps = [steps_to(TAUS[schedule.name] + learners.more_tau(seed), 0.9, 3) for seed in seeds]
        ends_s = []
        for seed, n_steps in zip(seeds, steps, strict=True):
            one = job.model_copy(update={"seed": seed})
            built = build(one, schedule)
            ends_s.append(step_end_s(simulate(built.plan, built.costs, delays(one)))[n_steps - 1].max())
        found_s[schedule.name] = np.mean(ends_s)
        assert row["steps_to_target"] == pytest.approx(np.mean(steps))
        assert row["target_s"] == pytest.approx(np.mean(ends_s))
        assert row["reached"] == row["runs"] == 5
    assert document["rows"][1]["target_speedup"] == pytest.approx(found_s["sync"] / found_s["local-4"])
    censored = document["rows"][2]
    assert (censored["reached"], censored["target_s"], censored["target_speedup"]) == (0, None, None)
    assert [each["text"] for each in document["remarks"] if each["kind"] == "result"] == [NEVER]


def test_what_is_there_is_not_trained_again_also_with_another_target(learn, scenario, tmp_path):
    first = learn(scenario, tmp_path / "d", "--seeds", "2")
    n_runs = len(trained(tmp_path / "d"))
    assert n_runs == 6
    torn = tmp_path / "d" / "rows.jsonl"
    assert learn(scenario, tmp_path / "d", "--seeds", "2").out == first.out
    again = learn(scenario, tmp_path / "d", "--seeds", "2", target="loss <= 0.9")
    assert "5 of 5" not in again.out
    assert "training loss" in again.out
    assert len(trained(tmp_path / "d")) == n_runs
    torn.write_bytes(torn.read_bytes()[:-100])
    assert learn(scenario, tmp_path / "d", "--seeds", "2").out == first.out
    assert len(trained(tmp_path / "d")) == n_runs + 1


def test_a_run_that_hangs_is_named_and_the_others_are_kept(learn, scenario, tmp_path, monkeypatch):
    monkeypatch.setenv("LEARNER_HANG", "local-4")
    answer = learn(scenario, tmp_path / "d", "--seeds", "1", "--time-limit", "1 s")
    assert answer.code == 1
    assert (
        "1 of 3 runs failed; the others are done:\nlocal-4, seed 1: not done after 1 s; it hangs after step 0"
        in answer.err
    )
    assert [
        json.loads(line)["schedule"] for line in (tmp_path / "d" / "rows.jsonl").read_text().split("\n") if line
    ] == [
        "sync",
        "hsgd-2-4,4-world",
    ]


@pytest.mark.parametrize(
    ("free_nbytes", "code", "said"),
    [
        (10**7, 0, "a training run takes 1.04 MB of memory for 8 ranks; 10 MB are free"),
        (15 * 10**5, 0, "a training run takes 1.04 MB of memory for 8 ranks; 1.5 MB are free, so at most 1 at a time"),
        (
            10**6,
            1,
            "takes 1.04 MB of memory for 8 ranks; 1 MB are free: take a smaller model or batch, or fewer ranks",
        ),
    ],
)
def test_memory_is_told_before_it_is_taken(learn, scenario, tmp_path, monkeypatch, free_nbytes, code, said):
    monkeypatch.setattr("simdist.cli.learn.free_memory_nbytes", lambda: free_nbytes)
    monkeypatch.setattr("simdist.jobs.workers.InProcess.n_underway", 2)
    answer = learn(scenario, tmp_path / "d", "--seeds", "1")
    assert (answer.code, said in answer.err) == (code, True), answer.err
    assert (tmp_path / "log").exists() == (code == 0)


def test_who_is_late_in_the_simulation_is_late_in_the_training(learn, scenario, tmp_path):
    edited_text = (
        SMALL[: SMALL.index("schedules:")] + "schedules:\n  - kind: sync\n  - {kind: backup_workers, backup: 2}\n"
    )
    job = load(write(tmp_path / "backup.yaml", edited_text))
    assert learn(tmp_path / "backup.yaml", tmp_path / "d", "--seeds", "1").code == 0
    (run,) = [each for each in trained(tmp_path / "d") if each["label"] == "backup-2"]
    built = build(job, job.schedules[1])
    late = simulate(built.plan, built.costs, delays(job)).late
    of_updates = [list(late[row]) for row in drops_late(built.plan)]
    assert [len(ranks) for ranks in of_updates] == [2] * 12
    assert [run["late"][row] for row in sorted(run["late"], key=int) if len(run["late"][row]) == 2] == of_updates


@pytest.mark.parametrize(
    ("taus", "target", "said"),
    [
        (dict.fromkeys(TAUS, 0.1), TARGET, "too easy: every run is there by the first evaluation, after 3 steps"),
        (dict.fromkeys(TAUS, 12.0), TARGET, "all schedules have the same curve over steps within the noise"),
        (
            dict.fromkeys(TAUS, 12.0) | {"sync": 12.3},
            TARGET,
            "every run is there by the same evaluation, after 30",
        ),
        (TAUS, "accuracy >= 0", "is met before the first step, so nothing is learnt on the way: ask for more"),
        (TAUS, "loss <= 0.1", "the training loss is that of each rank's own parameters on its own batch"),
        (
            TAUS | {"local-4": 13.5},
            TARGET,
            "5 seeds do not tell local-4 from sync: the difference is within their noise",
        ),
    ],
)
def test_says_what_a_table_does_not_tell(learn, scenario, tmp_path, monkeypatch, taus, target, said):
    monkeypatch.setenv("LEARNER_TAU", json.dumps(taus))
    answer = learn(scenario, tmp_path / "d", target=target)
    assert said in " ".join(answer.out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "accuracy = 0.9"}, "--target 'accuracy = 0.9': write METRIC >= NUMBER or METRIC <= NUMBER"),
        ({"target": "acuracy >= 0.9"}, "--target 'acuracy': the task has no such metric: did you mean 'accuracy'?"),
        ({"target": "accuracy >= nan"}, "--target 'accuracy >= nan': write METRIC >= NUMBER"),
        ({"target": ""}, "--target '': write METRIC >= NUMBER"),
        ({"task": "broken"}, "--task broken: task broken: it has no parameters"),
    ],
)
def test_wrong_input_is_named(learn, scenario, tmp_path, options, message):
    answer = learn(scenario, tmp_path / "d", "--seeds", "1", **options)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    assert not (tmp_path / "log").exists()  # nothing is trained


def test_intervals_are_wider_where_runs_are_looked_at_seldom(learn, scenario, tmp_path):
    """Runs that arrive at the same evaluation may be up to its distance apart."""
    rows = {}
    for every in (1, 12):
        answer = json.loads(learn(scenario, tmp_path / f"{every}", "--json", "--evaluate-every", f"{every}").out)
        rows[every] = answer["rows"][1]
    assert rows[12]["steps_to_target"] == 48
    low, high = rows[12]["steps_to_target_ci95"]
    assert high - low == pytest.approx(2 * 1.96 * 11 / math.sqrt(12 * 5), rel=1e-3)
    widths = [np.diff(rows[every]["target_speedup_ci95"]).item() for every in rows]
    assert widths[0] < widths[1]


def test_a_target_is_met_but_for_what_float32_rounds():
    target = parse_target("accuracy >= 0.7")
    assert target.reached(np.array([0.6, np.float32(0.7)])) == 1
    assert target.reached(np.array([0.6, 0.6999])) is None


def test_targets_are_of_the_average_model_unless_they_say_so():
    assert [parse_target(text).model for text in ("a >= 1", "rank0.a<=1")] == ["average", "rank0"]


def test_a_page_tells_the_last_answer(learn, scenario, tmp_path, capsys):
    folder, page = tmp_path / "d", tmp_path / "d.html"
    answer = json.loads(learn(scenario, folder, "--json").out)
    assert call(capsys, "report", folder, "-o", page).code == 0
    text = page.read_text(encoding="utf-8")
    for part in (NEVER, "speed-up to target", answer["title"].partition(": ")[2], "data:image/svg+xml;base64,"):
        assert part in text, part
    assert [each["schedule"] for each in answer["curves"]] == list(TAUS)
    sync = answer["curves"][0]
    assert sync["mean"][-1] == pytest.approx(answer["rows"][0]["final"])
    assert sync["seconds"][-1] == pytest.approx(60 * answer["rows"][0]["step_s"])
    refused = call(capsys, "report", folder, "-o", page, "--steps", "1:2")
    assert (refused.code, "curves of training" in refused.err) == (2, True)
    (folder / "learned.json").write_text('{"rows": [{}]}')
    damaged = call(capsys, "report", folder, "-o", page)
    assert (damaged.code, "learned.json: is damaged: run learn into this folder again" in damaged.err) == (1, True)


def test_rare_delays_count_as_often_as_they_are_expected(learn, tmp_path):
    """A delay of sync holds all up for its length, so the mean over endless seeds is known."""
    rare = ("probability: 10%, delay: 50 ms", "probability: 0.02%, delay: 5 s")
    scenario = write(tmp_path / "rare.yaml", edited(("steps: 12", "steps: 60"), rare))
    answer = learn(scenario, tmp_path / "d", "--seeds", "3", "--json")
    assert answer.code == 0, answer.err
    document, job = json.loads(answer.out), load(scenario)
    for row, compared in zip(document["rows"], compare(job, n_seeds=3), strict=True):
        for name in ("step_s", "step_s_ci95", "speedup", "speedup_ci95"):
            assert row[name] == pytest.approx(getattr(compared, name), rel=1e-9), name
    (sync, local, _) = document["rows"]
    calm_s = compare(job.changed(disturbances=()), n_seeds=1)[0].step_s
    expected_s = calm_s + job.cluster.world_size * 0.0002 * 5
    assert sync["target_s"] == pytest.approx(sync["steps_to_target"] * expected_s, rel=0.02)
    for row in (sync, local):
        low, high = row["target_s_ci95"]
        assert high - low > 0.02 * row["target_s"]
    assert any("fell into" in each["text"] for each in document["remarks"])
