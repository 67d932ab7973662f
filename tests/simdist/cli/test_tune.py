"""`simdist tune`, from its options to what it prints and writes."""

import json

import numpy as np
import pytest
from commandline import SMALL, edited, write

from simdist.cli import main
from simdist.cli import tune as tune_command
from simdist.cli.common import CliSession
from simdist.errors import ScenarioError
from simdist.scenario import loads
from simdist.tuning.evaluating import Evaluator

QUICK = {"seeds": 4, "search_seeds": 2, "global_every": 2}


@pytest.fixture
def scenario(tmp_path):
    return write(tmp_path / "job.yaml", edited(("steps: 12", "steps: 24")))


def tune(capsys, name, *, session=None, as_json=False, **options):
    capsys.readouterr()
    arguments = [str(name), *(["--json"] if as_json else [])]
    for option, value in (QUICK | options).items():
        arguments += [f"--{option.replace('_', '-')}", str(value)]
    tune_command.command.main(arguments, standalone_mode=False, obj=session or CliSession())
    return capsys.readouterr()


def test_prints_a_table_a_verdict_an_entry_that_loads_and_what_is_not_known(capsys, scenario):
    out, err = tune(capsys, scenario)
    assert "warning" not in err
    runs, tried = "runs of 24 steps or a few more", "10 plans of 10 candidates tried"
    assert f"job: 8 ranks, {runs}; {tried}; finalists again with 4 other seeds" in " ".join(out.split())
    assert "\nlocal-2 is 1." in out
    assert "times as fast as sync.\n" in out
    assert "Not modelled: " in out
    pasted = out[out.index("\nschedules:") : out.index("\n\ncluster.network.efficiency is not stated")]
    (schedule,) = loads(SMALL[: SMALL.index("schedules:")] + pasted.strip()).schedules
    assert schedule.name == "local-2"


def test_json_has_the_rows_of_fresh_seeds_and_what_the_search_thought(capsys, scenario):
    out, _ = tune(capsys, scenario, as_json=True, max_bytes="600 kB")
    document = json.loads(out)
    assert document["change"] is True
    assert document["best"] == document["rows"][0]["schedule"] == "local-2"
    assert document["baseline"] == "sync"
    assert document["constraints"]["global_every"] == 2
    assert document["constraints"]["max_nbytes"] == 600_000
    assert document["constraints"]["memory_nbytes"] is None
    assert document["excluded"] == {"--max-bytes '600 kB'": 3}
    first = document["rows"][0]
    assert first["seeds"] == 4
    assert first["search_step_s"] != first["step_s"]
    assert first["global_every_steps"] == 2
    assert first["entry"] == "- {kind: local_sgd, period: 2}"


def test_micro_batches_are_told(capsys, scenario):
    out, _ = tune(capsys, scenario, micro_batches="1,2")
    assert "\n\nDelays are drawn per step" in out
    assert "per micro-batch" in out
    assert "\nlocal-2-mb2 is 1." in out
    assert "times as fast as sync per sample.\n" in out
    assert "\nworkload: {micro_batches: 2}" in out


def test_checkpoints_are_varied_and_told(capsys, scenario):
    text = scenario.read_text()
    disk = "steps: 24\ncheckpoint: {every: 4, what: parameters, to: disk}"
    cluster = "gpus_per_node: 4\n  disk: {read: 1 GB/s, write: 1 MB/s}"
    write(scenario, edited(("steps: 24", disk), ("gpus_per_node: 4", cluster), text=text))
    options = {"checkpoint_every": "2,8", "checkpoint_mode": "async", "only": "sync"}
    out, _ = tune(capsys, scenario, **options)
    assert "runs of 80 steps or a few more" in " ".join(out.split())
    assert "-saves-every-8-saves-async is " in out
    assert "\ncheckpoint: {every: 8, mode: async}" in out
    assert "The further apart checkpoints are, the more work a failure costs." in " ".join(out.split())
    rows = json.loads(tune(capsys, scenario, as_json=True, checkpoint_every="2,8", only="sync").out)["rows"]
    assert {row["schedule"]: row["checkpoint"]["every"] for row in rows}["sync"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_every": "8"}, r"--group-every '8': write RANKS:STEPS, .* such as 8:2"),
        ({"group_every": "1:2"}, r"--group-every '1:2': write RANKS:STEPS"),
        ({"max_bytes": "20"}, r"--max-bytes: "),
        ({"memory": "20 Mbit"}, r"--memory: "),
        ({"min_density": "2"}, r"--min-density: "),
        ({"min_density": "0"}, r"--min-density 0: nothing would be sent"),
        ({"micro_batches": "1,0"}, r"--micro-batches '1,0': write numbers of passes"),
        ({"micro_batches": "4097"}, r"--micro-batches '4097': write numbers of passes of a step, 1 to 4,096"),
        ({"checkpoint_every": "0"}, r"--checkpoint-every '0': write numbers of steps, 1 to 24"),
        ({"checkpoint_every": "25"}, r"--checkpoint-every '25': write numbers of steps, 1 to 24"),
        ({"checkpoint_every": "8"}, r"--checkpoint-every: the scenario writes no checkpoints; write checkpoint: "),
        ({"checkpoint_mode": "async"}, r"--checkpoint-mode: the scenario writes no checkpoints; write checkpoint: "),
        ({"baseline": "fast"}, r"no schedule is called 'fast' to compare with"),
        ({"global_every": 25}, r"--global-every 25: the scenario has 24 steps"),
    ],
)
def test_wrong_options_get_one_clear_error(capsys, scenario, options, message):
    with pytest.raises(ScenarioError, match=message):
        tune(capsys, scenario, **options)


def test_recordings_are_drawn_for_every_seed_and_it_says_so(capsys, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "late.npz", np.where(rng.random((24, 8)) < 0.1, 0.05, 0.0))
    drawn = "{kind: transient, probability: 10%, delay: 50 ms}"
    text = edited(("steps: 12", "steps: 24"), ("seed: 1\n", ""), (drawn, "{kind: recorded, on: host, file: late.npz}"))
    out, err = tune(capsys, write(tmp_path / "job.yaml", text), as_json=True)
    assert "recorded disturbances: every seed draws its own blocks of the recorded steps" in err
    low, high = json.loads(out)["rows"][0]["speedup_ci95"]
    assert 0 < low < high  # a recording that is played as it is has no interval


@pytest.mark.parametrize(("resampling", "warnings"), [("", 0), (", resample_steps: 1", 1)])
def test_a_recording_is_no_seed_without_effect_and_stated_blocks_are_warned_of(capsys, tmp_path, resampling, warnings):
    np.savez(tmp_path / "late.npz", np.eye(12, 8) / 10)
    played = f"{{kind: recorded, on: host, file: late.npz{resampling}}}"
    text = edited(("{kind: transient, probability: 10%, delay: 50 ms}", played))
    out, err = tune(capsys, write(tmp_path / "job.yaml", text), only="local_sgd")
    assert "warning" not in err
    blocks = "blocks of 1 steps, as stated, are shorter than the longest period, 2 steps"
    assert " ".join(out.split()).count(blocks) == warnings


def test_the_text_says_what_intervals_are_about(capsys, scenario, tmp_path):
    assert "speed-up over sync, ± error of the simulation (95 %)" in " ".join(tune(capsys, scenario).out.split())
    np.savez(tmp_path / "late.npz", np.eye(24, 8) / 10)
    drawn = "{kind: transient, probability: 10%, delay: 50 ms}"
    played = write(
        tmp_path / "played.yaml",
        edited((drawn, "{kind: recorded, on: host, file: late.npz}"), ("seed: 1\n", ""), ("steps: 12", "steps: 24")),
    )
    out = " ".join(tune(capsys, played).out.split())
    assert "speed-up over sync, ± what 24 recorded steps leave open (95 %)" in out


def test_a_run_of_few_periods_of_a_data_set_is_warned_of(capsys, tmp_path):
    data = "input: {source: storage, data: {samples: 4096, file_size: 1 kB}}\n"
    links = "  network: {latency: 25 us, bandwidth: 25 Gbit/s}\n"
    stored = links + "  storage: {latency: 1 ms, bandwidth: 1 GB/s}\n"
    text = edited((links, stored), ("steps: 12\n", "steps: 12\n" + data))
    _, err = tune(capsys, write(tmp_path / "job.yaml", text), only="sync", seeds=2, search_seeds=1)
    assert "12 steps of a data set hold fewer than 10 periods of 2 steps" in err
    assert "write steps: 20 or more" in err


@pytest.mark.parametrize(
    ("disturbance", "is_said"),
    [
        ("{kind: persistent, on: link, link: nic, share: 50%}", False),
        ("{kind: transient, probability: 10%, delay: 50 ms}", True),
    ],
)
def test_delays_of_steps_with_more_micro_batches_are_spoken_of_where_there_are_some(
    capsys, tmp_path, disturbance, is_said
):
    text = SMALL[: SMALL.index("disturbances:")] + f"disturbances: [{disturbance}]\nschedules: [{{kind: sync}}]\n"
    out, _ = tune(capsys, write(tmp_path / "job.yaml", text), only="sync", micro_batches="1,2")
    assert ("Delays are drawn per step" in out) == is_said


def test_interrupted_search_prints_an_incomplete_answer_and_exits_with_130(capsys, monkeypatch, scenario):
    evaluate = Evaluator.evaluate
    tried = []

    def interrupted(evaluator, candidate):
        if len(tried) == 3:
            raise KeyboardInterrupt
        tried.append(candidate)
        return evaluate(evaluator, candidate)

    monkeypatch.setattr(Evaluator, "evaluate", interrupted)
    arguments = ["tune", str(scenario), "--seeds", "2", "--search-seeds", "1", "--global-every", "2"]
    assert main(arguments) == 130
    assert "search interrupted, incomplete: 3 plans of 10 candidates tried" in " ".join(capsys.readouterr().out.split())
    tried.clear()
    assert main([*arguments, "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["complete"] is False
