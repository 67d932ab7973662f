"""The benchmarks run, in sizes so small that their numbers mean nothing."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import load_script

ENGINES = Path(__file__).resolve().parents[2] / "benchmarks" / "engines.py"
NETWORK = ENGINES.with_name("network.py")
READERS = ENGINES.with_name("readers.py")
EXPANSION = ENGINES.with_name("expansion.py")
SWEEP = ENGINES.with_name("sweep.py")
QUESTIONS = ENGINES.with_name("questions.py")


def run(*options, benchmark=ENGINES):
    done = subprocess.run([sys.executable, benchmark, *options], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def told_to_people(monkeypatch, capsys, benchmark, **measured):
    """Return the tables of a benchmark whose functions give what was measured before."""
    monkeypatch.setattr(sys, "path", sys.path.copy())  # a benchmark adds to it
    script = load_script(benchmark)
    for name, result in measured.items():
        monkeypatch.setattr(script, name, lambda *args, result=result: result)
    monkeypatch.setattr(sys, "argv", [str(benchmark), "--quick"])
    assert script.main() == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    return text


def test_engine_benchmark_tells_machines_and_people_what_it_measured(monkeypatch, capsys):
    found = json.loads(run("--quick", "--json"))
    assert len(found["engines"]) == 4
    for row in found["engines"]:
        assert row["rank_ops"] % found["sizes"]["ranks"] == 0
        assert row["fast_over_des"] == pytest.approx(row["fast_rank_ops_per_s"] / row["des_rank_ops_per_s"])
        assert min(value for name, value in row.items() if name != "schedule") > 0
    assert found["compare"]["schedules"] == 7
    by_ranks, by_steps = found["scaling"]["by_ranks"], found["scaling"]["by_steps"]
    assert [row["ranks"] for row in by_ranks] == found["sizes"]["large_ranks"]
    assert [row["steps"] for row in by_steps] == found["sizes"]["large_steps"]
    assert [row["peak_MiB_ratio"] is None for row in by_ranks] == [True, False, False]
    assert {row["what"] for row in found["targets"]} >= {"fast over des", "compare s", "large MiB"}
    measured = {"engines": found["engines"], "whole_comparison": found["compare"], "scaling": found["scaling"]}
    text = told_to_people(monkeypatch, capsys, ENGINES, **measured)
    for title in ("engines, 32 ranks x 8 steps", "whole comparison", "by ranks", "by steps", "targets"):
        assert title in text


def test_network_benchmark_tells_machines_what_it_measured():
    found = json.loads(run("--quick", "--json", benchmark=NETWORK))
    assert [row["shared"] for row in found["engine"]] == [False, True, True]
    assert all(row["levels"] > 1 and row["ms"] > 0 for row in found["rates"])
    assert [row["links"] for row in found["islands"]] == found["sizes"]["islands"]
    assert [row["nodes"] for row in found["flows"]] == [4, 6, "4, plain"]
    for row in found["flows"]:
        assert row["flows_per_s"] > 0
        if isinstance(row["simgrid_per_s"], float):
            assert float(row["apart"]) < 1e-12
    assert len(found["targets"]) == 6


def test_readers_benchmark_tells_machines_what_it_measured():
    found = json.loads(run("--quick", "--json", benchmark=READERS))
    rows = found["readers"]
    assert [row["case"] for row in rows] == ["server", "compute", "alone"] * len(found["sizes"]["shapes"])
    assert all(row["instances"] > 0 and row["seconds"] > 0 for row in rows)
    assert [row["over_alone"] for row in rows if row["case"] == "alone"] == [1.0] * len(found["sizes"]["shapes"])
    assert found["targets"][0]["reached"] == max(row["seconds"] for row in rows)


def test_expansion_benchmark_counts_its_messages():
    found = json.loads(run("--members", "32", "--direct", "16", "--json", benchmark=EXPANSION))
    assert min(found["direct_8_per_s"], found["direct_1_per_s"]) > 0
    assert found["messages"] == 2 * 31 * 32
    assert found["seconds"] > 0
    assert "messages 1,984" in run("--members", "32", "--direct", "16", benchmark=EXPANSION)


def test_peak_memory_is_that_of_the_process_that_was_asked():
    small, large = (json.loads(run("--large", ranks, "8"))["peak_MiB"] for ranks in ("64", "4096"))
    assert 10 < small <= large < 2000


@pytest.mark.sentinel
def test_fast_engine_is_a_class_of_its_own():
    """A ratio of one run, far below the 100 that the benchmark holds it to: a slip of an order of magnitude is seen."""
    module = runpy.run_path(str(ENGINES))
    [*rows] = module["engines"](module["Sizes"](ranks=128, steps=40, repetitions=9, batch_seeds=8))
    assert min(row["fast_over_des"] for row in rows) > 15


@pytest.mark.full
def test_sweep_benchmark_tells_machines_and_people_what_it_measured(monkeypatch, capsys):
    found = json.loads(run("--quick", "--json", benchmark=SWEEP))
    assert (found["rows"], found["processes"]) == (40, 2)
    assert found["efficiency"] == pytest.approx(found["pool_rows_per_s"] / found["serial_rows_per_s"] / 2)
    assert found["processor_share"] > 0
    assert [row["what"] for row in found.pop("targets")] == ["efficiency"]
    assert "40 rows in this process and in 2" in told_to_people(monkeypatch, capsys, SWEEP, measured=found)


@pytest.mark.full
def test_questions_benchmark_tells_machines_and_people_what_answers_cost(monkeypatch, capsys, tmp_path):
    file = tmp_path / "questions.json"
    printed = run("--quick", "--json", str(file), "--only", "report", benchmark=QUESTIONS)
    assert "report, 16 ranks" in printed
    found = json.loads(file.read_text(encoding="utf-8"))
    [row] = found["questions"]
    assert row["question"] == "report, 16 ranks"
    assert row["cpu_s"] > 0
    assert 10 < row["peak_MiB"] < 2000
    assert "report" in row["shares"]
    assert 0.5 < sum(row["shares"].values()) <= 1
    script = load_script(QUESTIONS)
    found["growth"] = script.growth(script.QUICK)
    for growing in found["growth"]:
        assert len(growing["cpu_s"]) == len(growing["sizes"]) == 3
        assert min(growing["cpu_s"]) > 0
    text = told_to_people(monkeypatch, capsys, QUESTIONS, measured=[found | {"growth": []}, found])
    for title in ("questions", "report, 16 ranks", "growth with", "ranks", "buckets", "steps"):
        assert title in text


def test_a_question_that_fails_leaves_the_answers_before_it(monkeypatch, capsys, tmp_path):
    script = load_script(QUESTIONS)
    asked = [script.Question(name, ("compare",), {}) for name in ("first", "second")]

    def ask(question, tree):
        if question.name == "second":
            raise SystemExit("second: exit code 2")
        return script.Answer(question.name, 1.0, 100.0, "digest", {})

    monkeypatch.setattr(script, "questions", lambda quick: asked)
    monkeypatch.setattr(script, "ask", ask)
    monkeypatch.setattr(script, "where", lambda question, tree: {"start": 1.0})
    file = tmp_path / "questions.json"
    monkeypatch.setattr(sys, "argv", [str(QUESTIONS), "--json", str(file)])
    with pytest.raises(SystemExit):
        script.main()
    assert [each["question"] for each in json.loads(file.read_text(encoding="utf-8"))["questions"]] == ["first"]
    assert "first" in capsys.readouterr().out


def test_questions_of_two_clones_have_a_ratio_only_where_answers_are_equal():
    script = load_script(QUESTIONS)
    ours = script.Answer("compare", 2.0, 100.0, "same", {})
    theirs = script.Answer("compare", 3.0, 100.0, "same", {})
    [row] = script.rows([ours], [theirs])
    assert row["other / this"] == "1.5"
    [row] = script.rows([ours], [script.replace(theirs, digest="another")])
    assert row["other / this"] == "other answer"


def test_a_question_that_fails_is_told_with_what_the_command_said():
    script = load_script(QUESTIONS)
    with pytest.raises(SystemExit, match=r"(?s)strange: exit code 2.*nothing.yaml"):
        script.ask(script.Question("strange", ("compare", "nothing.yaml"), {}), script.ROOT)


def test_growth_in_proportion_to_size_has_the_exponent_one(monkeypatch):
    script = load_script(QUESTIONS)
    monkeypatch.setattr(script, "compared_s", lambda size, _: size["ranks"] * size["steps"] ** 2)
    exponents = {each["of"]: each["exponent"] for each in script.growth(script.QUICK)}
    assert exponents == {"ranks": pytest.approx(1), "buckets": pytest.approx(0, abs=1e-9), "steps": pytest.approx(2)}
