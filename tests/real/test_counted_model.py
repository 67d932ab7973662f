"""PyTorch models as workloads: tensors and FLOPs of users' models, against counts by hand, and what it refuses."""

import json
import subprocess
from pathlib import Path

import pytest
from commandline import Answer, call
from processes import answer_in_forks

torch = pytest.importorskip("torch")

from engine_runs import simulate  # noqa: E402

from simdist.drafts.counted_model import count_model  # noqa: E402
from simdist.runs.building import build  # noqa: E402
from simdist.scenario import load, load_workload  # noqa: E402

MODULE = "counted_models"


@pytest.fixture(autouse=True)
def _finds_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "user_modules"))
    monkeypatch.chdir(tmp_path)
    answer_in_forks(monkeypatch)


@pytest.fixture
def as_users_do(_finds_models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count in an interpreter of its own."""
    monkeypatch.setattr("simdist.jobs.asking.subprocess", subprocess)


def count(name: str, **given: str) -> dict:
    found: dict = json.loads(json.dumps(count_model(f"{MODULE}:{name}", **given).document()))
    return found


def init(capsys, model: str, *options: object) -> Answer:
    return call(capsys, "init", "--from", model, "--cluster", "dgx-h100", *options)


def refusal(answer: Answer) -> str:
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.count("\n") == 1
    return answer.err


def test_tied_tensors_count_once_and_frozen_ones_and_buffers_not_at_all() -> None:
    """A sample has 7 tokens: 2 x 7 x 4 x 4 FLOPs of the frozen layer, 2 x 7 x 4 x 10 of the logits."""
    found = count("tied")
    rows = [tuple(each[key] for key in ("name", "count", "rows", "flops")) for each in found["tensors"]]
    assert rows == [
        ("embedding.weight", 40, 10, 2 * 7 * 4 * 4),
        ("norm.weight", 4, 4, 0),
        ("norm.bias", 4, 4, 2 * 7 * 4 * 10),
    ]
    assert (found["parameters"], found["nbytes"], found["flops"]) == (48, 192, 2 * 7 * 4 * 14)
    assert (found["frozen_parameters"], found["buffers_nbytes"]) == (16, 16)
    assert (found["batch_size"], found["sample_nbytes"]) == (3, 7 * 8)
    assert [each[:29] for each in found["remarks"]] == ["16 elements are frozen and no"]


def test_inputs_may_have_names() -> None:
    assert count("tied_by_name")["tensors"] == count("tied")["tensors"]


def test_order_is_that_of_the_forward_pass_and_unused_tensors_come_last() -> None:
    found = count("backwards")
    names = ["first.weight", "first.bias", "last.weight", "last.bias", "idle.weight", "idle.bias"]
    assert [each["name"] for each in found["tensors"]] == names
    assert [each["flops"] for each in found["tensors"]] == [2 * 3 * 8, 0, 2 * 8 * 2, 0, 0, 0]
    assert found["sample_nbytes"] == (3 + 2) * 4
    [remark] = found["remarks"]
    assert remark.startswith("the forward pass does not use 2 tensors (idle.weight, idle.bias)")


def test_lazy_layers_get_their_sizes_from_the_sample(capsys) -> None:
    assert [each["count"] for each in count("lazy")["tensors"]] == [20, 4, 8, 2]
    told = refusal(init(capsys, f"{MODULE}:lazy_alone"))
    assert "lazy layers get their sizes from a sample: return (module, sample batch), or write --input" in told


def test_model_may_be_larger_than_memory() -> None:
    """64 matrices of 2^30 elements, and 2 FLOPs for each and sample."""
    found = count("huge", shape="32768")
    assert (found["parameters"], found["nbytes"], found["dtype"]) == (2**36, 2**37, "bfloat16")
    assert found["flops"] == 2 * 2**36


@pytest.mark.parametrize(
    ("name", "shape", "flops"),
    [
        ("convolution", "3x10x10", 2 * 100 * 8 * 27),
        ("convolution", "3,10,10", 2 * 100 * 8 * 27),
        ("GLOBAL", "3", 24),
    ],
)
def test_flops_are_those_of_a_sample_whatever_gives_it(name: str, shape: str, flops: int) -> None:
    assert count(name, shape=shape)["flops"] == flops


@pytest.mark.usefixtures("as_users_do")
def test_compiled_model_is_counted() -> None:
    """In an interpreter that switches dynamo off before it loads torch."""
    assert count("compiled")["flops"] == 24


def test_without_a_sample_sizes_are_known_and_flops_are_not() -> None:
    found = count("convolution")
    assert [each["count"] for each in found["tensors"]] == [216, 8, 8]
    assert (found["flops"], found["batch_size"], found["sample_nbytes"]) == (None, None, 0)
    [remark] = found["remarks"]
    assert remark.startswith("without a sample, tensors stand in the order of their definition and FLOPs are not known")


def test_type_is_that_of_most_elements() -> None:
    found = count("mixed", device="cpu")
    assert (found["dtype"], found["nbytes"]) == ("bfloat16", 2 * (64 + 8 + 16))
    assert "16 elements are float32: they count as bfloat16, the type of most" in found["remarks"]


@pytest.mark.usefixtures("as_users_do")
def test_values_are_there_where_they_are_asked_for(capsys) -> None:
    """Not in a fork, whose standard output and standard error are one."""
    answer = init(capsys, f"{MODULE}:reads_values", "--device", "cpu", "--forward", "1 ms", "--batch-size", 1)
    assert answer.code == 0
    assert "weights add up to" in answer.err
    assert "weights add up to" not in answer.out


def test_scenario_takes_the_workload(capsys, tmp_path: Path) -> None:
    """240 FLOPs at 40 % of 1 kFLOP/s take 0.2 s forward and 0.4 s backward, for a batch of 4 samples 4 times that."""
    path = tmp_path / "job-workload.yaml"
    options = ("-o", tmp_path / "job.yaml", "--utilization", "40%", "--precision", "bf16")
    answer = init(capsys, f"{MODULE}:backwards", *options)
    assert answer.code == 0, answer.err
    assert "backwards: 6 tensors, 80 parameters, 320 B of float32; forward 80 FLOP per sample" in answer.out
    workload = load_workload(path)
    assert (workload.batch_size, workload.flops, workload.sample_nbytes) == (4, 80, 20)
    scenario = load(
        {
            "cluster": {
                "nodes": 1,
                "gpus_per_node": 1,
                "fabric": "ideal",
                "network": "ideal",
                "device": {"peak_flops": {"bf16": 1000.0}},
            },
            "workload": {"file": str(path)},
            "steps": 1,
            "schedules": ["sync"],
        }
    )
    built = build(scenario, scenario.schedules[0])
    assert simulate(built.plan, built.costs, {}).makespan_s == pytest.approx(3 * 4 * 80 / 400)
    written = load(tmp_path / "job.yaml")
    assert (written.workload.flops, written.workload.batch_size) == (80, 4)
    assert written.workload.utilization.at("bf16") == 0.4
    (tmp_path / "job.yaml").unlink()
    assert "job-workload.yaml: exists already" in init(capsys, f"{MODULE}:backwards", *options).err
    forward = ("--forward", "20ms", "--batch-size", "7", "--force")
    assert init(capsys, f"{MODULE}:convolution", "-o", tmp_path / "job.yaml", *forward).code == 0
    assert (load_workload(path).forward_s, load_workload(path).batch_size) == (0.02, 7)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "returns None: return the module, or (module, sample batch)"),
        ("with_optimizer", "returns (Linear, SGD): return the module, or (module, sample batch)"),
        ("of_size", "needs arguments (width): write a function without any that calls it"),
        ("NUMBER", "is no function, but int: write a function, and return the module, or (module, sample batch)"),
        ("ties", "has no 'ties'; did you mean 'tied'?"),
        ("doubles", "most parameters are float64: convert it to float32, float16, bfloat16"),
        ("all_frozen", "has no parameter that is trained: nothing is exchanged"),
        ("wrong_batch", "its forward pass fails: RuntimeError: a and b must have same reduction dim"),
        ("leaves", "counted_models.py:107: SystemExit: 3"),
        ("reads_values", "tensors of the meta device have no values: write --device cpu"),
    ],
)
def test_model_that_cannot_be_counted_is_refused_in_a_line(capsys, name: str, problem: str) -> None:
    lines = init(capsys, f"{MODULE}:{name}")
    assert (lines.code, lines.out) == (2, "")
    assert problem in lines.err.splitlines()[-1]
    assert lines.err.splitlines()[-1].startswith("error: counted_models:")


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("no_such_module:model", "no module 'no_such_module'"),
        ("counted_models", "there is no such file"),
        ("counted_models.py:tied", "no module 'counted_models.py'"),
        ("counted_models:", "write module:function"),
        (":tied", "write module:function"),
        ("x" * 190 + ":tied", "no module"),
    ],
)
def test_model_that_is_not_found_is_refused_in_a_line(capsys, model: str, problem: str) -> None:
    assert problem in refusal(init(capsys, model))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--utilization", "40%", "--forward", "1ms"], "--utilization beside --forward: write one of them"),
        (["--utilization", "400%"], "--utilization: '400%' is no share of the peak"),
        (["--forward", "5"], "--forward: '5': a time needs a unit"),
        (["--input", "3x"], "--input '3x': write the shape of a sample, e.g. 3x224x224"),
        (["--input", "0x3"], "--input '0x3': write the shape of a sample"),
        (["--input", "9" * 5000], "write the shape of a sample"),
        (["--input", "1000000x1000000"], "it has 1,000,000,000 elements or less"),
        (["--input", "3", "--forward", "1ms"], "--batch-size: how many samples has a GPU in a pass?"),
        (["--utilization", "1", "--batch-size", "2"], "counted_models:GLOBAL: FLOPs are not known, so no time"),
    ],
)
def test_options_that_do_not_fit_are_refused(capsys, tmp_path, options: list[str], problem: str) -> None:
    answer = init(capsys, f"{MODULE}:GLOBAL", *options)
    assert answer.code == 2
    assert problem in answer.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_sample_of_a_model_that_returns_one_is_not_asked_for(capsys) -> None:
    told = refusal(init(capsys, f"{MODULE}:tied", "--input", "7"))
    assert "returns a sample batch already: leave --input out" in told
