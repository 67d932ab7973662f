"""`train_for`: what a whole job comes to, against closed forms."""

import json
import pickle

import pytest
from commandline import call, write

from simdist.errors import ScenarioError
from simdist.scenario import dump, loads
from simdist.settings.units import Elapsed
from simdist.studies.comparison import compare

SCENARIO = """
cluster: {nodes: 2, gpus_per_node: 1, fabric: ideal, network: {latency: 0 s, bandwidth: 10 MB/s}}
workload: {tensors: [{name: all, count: 1000000}], batch_size: 4, forward: 40 ms, backward: 60 ms}
input:
  data: {samples: 800, file_size: 1 kB}
steps: 40
train_for: LENGTH
schedules: [{kind: sync}, {kind: local_sgd, period: 4}]
"""
SYNC_S, LOCAL_S = 0.5, 0.2  # a step: 0.4 s of each average, of local SGD every fourth


def scenario_of(length: str):
    return loads(SCENARIO.replace("LENGTH", length))


@pytest.mark.parametrize(
    ("length", "n_steps"),
    [("1000", 1000), ("1e6", 10**6), ("1000 steps", 1000), ("90 epochs", 9000), ("1 epoch", 100), ("1 step", 1)],
)
def test_steps_and_epochs_take_their_number_of_steps(length: str, n_steps: int) -> None:
    scenario = scenario_of(length)
    assert scenario.train_for == n_steps
    rows = compare(scenario, n_seeds=1)
    documents = [row.document() for row in rows]
    assert [each["job_steps"] for each in documents] == [n_steps] * 2
    assert [each["job_s"] for each in documents] == pytest.approx([n_steps * SYNC_S, n_steps * LOCAL_S])


@pytest.mark.parametrize(("length", "seconds"), [("12 h", 43_200), ("90 min", 5400), ("100 ms", 0.1)])
def test_time_has_room_for_steps_of_each_schedule(length: str, seconds: float) -> None:
    scenario = scenario_of(length)
    assert scenario.train_for == Elapsed(seconds)
    documents = [row.document() for row in compare(scenario, n_seeds=1)]
    assert [each["job_s"] for each in documents] == [seconds] * 2
    assert [each["job_steps"] for each in documents] == pytest.approx([seconds / SYNC_S, seconds / LOCAL_S])


def test_table_shows_what_the_scenario_does_not_state(tmp_path, capsys) -> None:
    path = write(tmp_path / "x.yaml", SCENARIO.replace("LENGTH", "12 h"))
    timed = call(capsys, "compare", path).out
    for words in ("steps in 12 h", "86,400", "216,000"):
        assert words in timed
    counted = call(capsys, "compare", write(path, SCENARIO.replace("LENGTH", "90 epochs"))).out
    for words in ("9,000 steps", "1.25 h", "30 min"):
        assert words in counted


def test_without_a_length_nothing_is_told(tmp_path, capsys) -> None:
    path = write(tmp_path / "x.yaml", SCENARIO.replace("train_for: LENGTH\n", ""))
    rows = json.loads(call(capsys, "compare", path, "--json").out)["rows"]
    assert all("job_s" not in row and "job_steps" not in row for row in rows)
    assert "train_for" not in dump(loads(path.read_text()))


@pytest.mark.parametrize("length", ["12 h", "90 epochs", "1000"])
def test_length_is_written_down_and_read_again(length: str) -> None:
    scenario = scenario_of(length)
    assert loads(dump(scenario)) == scenario


@pytest.mark.parametrize(
    ("length", "problem"),
    [
        ("0", "train_for: 0: write at least 1"),
        ("0 h", "train_for: '0 h': write a time above 0 s, e.g. 30 min, or a number of steps"),
        ("1.5 epochs", "train_for: '1.5 epochs' is not a whole number of epochs: write e.g. 2 epochs"),
        ("2 weeks", "train_for: '2 weeks'"),
        ("1e16", "train_for: 1e+16: write 1,000,000,000,000,000 steps or less"),
        ("[12 h]", "train_for: ['12 h'] is not a whole number"),
        ("yes", "train_for: 'yes'"),
    ],
)
def test_length_that_is_none_is_refused(length: str, problem: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        scenario_of(length)
    assert problem in str(refused.value)


def test_epochs_need_a_data_set() -> None:
    text = SCENARIO.replace("input:\n  data: {samples: 800, file_size: 1 kB}\n", "")
    with pytest.raises(ScenarioError, match="train_for: '2 epochs': how many samples are there"):
        loads(text.replace("LENGTH", "2 epochs"))


def test_simulated_steps_are_no_time_and_may_name_their_unit() -> None:
    with pytest.raises(ScenarioError, match="steps: '12 h': simulated steps are a number"):
        loads(SCENARIO.replace("LENGTH", "1").replace("steps: 40", "steps: 12 h"))
    assert loads(SCENARIO.replace("LENGTH", "1").replace("steps: 40", "steps: 40 steps")).steps == 40


@pytest.mark.parametrize(("every", "steps"), [("1 epoch", 100), ("2 epochs", 200), ("30 steps", 30)])
def test_checkpoints_may_come_by_epochs(every: str, steps: int) -> None:
    text = SCENARIO.replace("LENGTH", f"1\ncheckpoint: {{every: {every}, what: parameters}}")
    stored = text.replace("cluster: {", "cluster: {storage: {latency: 0 s, bandwidth: 1 GB/s}, ")
    assert loads(stored).checkpoint.every == steps
    with pytest.raises(ScenarioError, match=r"checkpoint\.every: '1\.5 epochs' is not a whole number of epochs"):
        loads(stored.replace(every, "1.5 epochs"))


def test_epochs_are_counted_again_if_the_cluster_or_the_data_set_changes() -> None:
    text = SCENARIO.replace("LENGTH", "90 epochs\ncheckpoint: {every: 2 epochs, what: parameters}")
    text = text.replace("steps: 40", "steps: 1 epoch")
    scenario = loads(text.replace("cluster: {", "cluster: {storage: {latency: 0 s, bandwidth: 1 GB/s}, "))

    def lengths(of) -> tuple[int, int, int]:
        return of.steps, of.train_for, of.checkpoint.every

    assert lengths(scenario) == (100, 9000, 200)
    assert lengths(scenario.changed("cluster.nodes", 4)) == (50, 4500, 100)
    assert lengths(scenario.changed("cluster.nodes", 4).changed("input.data.samples", 1600)) == (100, 9000, 200)
    assert lengths(scenario.changed({"workload.micro_batches": 2, "steps": 7})) == (7, 4500, 100)
    assert lengths(scenario.changed("checkpoint.mode", "async").changed("cluster.nodes", 4)) == (50, 4500, 100)
    assert lengths(scenario.changed(steps=10, train_for="1 epoch")) == (10, 100, 200)
    assert lengths(pickle.loads(pickle.dumps(scenario)).changed("cluster.nodes", 4)) == (50, 4500, 100)
    assert lengths(scenario.changed("input.data", None).changed("cluster.nodes", 4)) == (100, 9000, 200)
    assert lengths(loads(dump(scenario))) == (100, 9000, 200)
    assert type(scenario.model_dump(mode="json")["steps"]) is int


def test_job_of_epochs_takes_half_the_steps_on_twice_the_ranks() -> None:
    twice = scenario_of("90 epochs").changed("cluster.nodes", 4)
    assert [row.document()["job_steps"] for row in compare(twice, n_seeds=1)] == [4500] * 2
