"""What the comparison with GPUs keeps can be predicted again, and its parts notice what is wrong."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from scripts import ROOT, load_script

torch = pytest.importorskip("torch")

from real.cli import main  # noqa: E402
from simdist.runs import calibrated, run_directory  # noqa: E402
from simdist.scenario import loads  # noqa: E402
from simdist.studies.validated_run import validate_run  # noqa: E402

HERE = ROOT / "experiments" / "gpu"
RECORDED = sorted((HERE / "results").glob("*.json"))
gpu = load_script(ROOT / "tools" / "gpu.py")
SCENARIO = {
    "cluster": {
        "nodes": 2,
        "gpus_per_node": 2,
        "fabric": {"latency": "50 us", "bandwidth": "2 GB/s"},
        "network": {"latency": "100 us", "bandwidth": "1 GB/s"},
        "device": {"name": "any", "memory_bandwidth": "10 GB/s", "host_bandwidth": "10 GB/s"},
    },
    "workload": {"preset": "mlp", "batch_size": 1, "forward": "3 ms", "backward": "5 ms"},
    "disturbances": [{"kind": "transient", "on": "host", "probability": "50%", "delay": "10 ms"}],
    "schedules": [{"kind": "sync"}, {"kind": "local_sgd", "period": 2}],
    "steps": 3,
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Return the modules of the experiment that have no torch of their own to load."""
    monkeypatch.syspath_prepend(str(HERE))
    names = ("kept", "values", "nccl", "shared_gpu", "steps", "verdicts")
    found = {name: load_script(HERE / f"{name}.py") for name in names}
    return found | {"common": found["kept"].common}


@pytest.fixture
def results(modules: dict[str, ModuleType], tmp_path: Path) -> Path:
    """Return the results of two runs of one real rank among simulated ones, with their archive."""
    common, kept = modules["common"], modules["kept"]
    runs = common.planned(SCENARIO, tmp_path / "planned")
    assert main([str(runs), "--rank", "1", "--peers", "simulated"]) == 0
    part = common.Part(lambda row: None, True, tmp_path / "results")
    rows = [kept.keep(part, runs / schedule, f"peers/{schedule}") for schedule in ("sync", "local-2")]
    gpu.pack(part.kept, tmp_path / "results.tar.xz")
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"parts": {"peers": {"rows": rows}}}), encoding="utf-8")
    return file


def rows_of(results: Path) -> list[dict]:
    document = json.loads(results.read_text(encoding="utf-8"))
    return [row for part in document["parts"].values() for row in part["rows"]]


def test_kept_runs_are_predicted_as_they_were(modules: dict[str, ModuleType], results: Path, tmp_path: Path) -> None:
    before = rows_of(results)
    assert modules["kept"].predict_again(results) == (2, [])
    assert rows_of(results) == before
    assert [(row["schedule"], row["ranks"], row["steps"]) for row in before] == [("sync", 4, 3), ("local-2", 4, 3)]
    for row, name in zip(before, ("sync", "local-2"), strict=True):
        found = validate_run(run_directory.read(tmp_path / "planned" / "runs" / name)).validation
        assert row["simulated_ms"] == pytest.approx(1e3 * found.simulated_s / 3, rel=1e-9)
        assert row["measured_ms"] == pytest.approx(1e3 * found.measured_s / 3, abs=1e-4)
        assert row["overlap"] == pytest.approx(found.overlap, abs=1e-4, nan_ok=True)
        assert row["error"] == pytest.approx(row["simulated_ms"] / row["measured_ms"] - 1)
        assert {"forward", "backward", "optimize"} < row["operations"].keys()
        assert [each["channel"] for each in row["injected"]] == ["host"]


def test_another_model_predicts_the_rank_anew_among_the_peers_that_it_had(
    modules: dict[str, ModuleType], results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rows_of(results)
    simulate = calibrated.price_run

    def repriced(update):
        def price_run(run, machines, *, real):
            return simulate(
                replace(run, scenario=run.scenario.model_copy(update=update(run.scenario))), machines, real=real
            )

        monkeypatch.setattr(calibrated, "price_run", price_run)
        assert modules["kept"].predict_again(results) == (2, [])
        return zip(rows_of(results), before, strict=True)

    def slower_links(scenario):
        network = scenario.cluster.network.model_copy(update={"latency_s": 1.0})
        return {"cluster": scenario.cluster.model_copy(update={"network": network})}

    for row, old in repriced(slower_links):
        assert row == old

    def slower_passes(scenario):
        return {"workload": scenario.workload.model_copy(update={"forward_s": 0.103})}

    for row, old in repriced(slower_passes):
        assert row["simulated_ms"] > old["simulated_ms"] + 80
        assert row["measured_ms"] == old["measured_ms"]
        assert row["error"] == pytest.approx(row["simulated_ms"] / row["measured_ms"] - 1)


def test_equal_files_give_equal_archives(results: Path, tmp_path: Path) -> None:
    archive, other = results.with_suffix(gpu.ARCHIVE), tmp_path / "other.tar.xz"
    copied = shutil.copytree(tmp_path / "results", tmp_path / "copied")
    for path in copied.rglob("*"):
        os.utime(path, (0, 0))
    gpu.pack(copied, other)
    assert other.read_bytes() == archive.read_bytes()


def test_what_lacks_is_said(modules: dict[str, ModuleType], results: Path) -> None:
    results.with_suffix(gpu.ARCHIVE).unlink()
    before = rows_of(results)
    said = "results.tar.xz: is not there, so 2 runs cannot be predicted again"
    assert modules["kept"].predict_again(results) == (0, [said])
    assert rows_of(results) == before


def test_a_key_that_is_gone_stops_no_other_run(modules: dict[str, ModuleType], results: Path, tmp_path: Path) -> None:
    file = tmp_path / "results" / "peers" / "sync" / "scenario.yaml"
    text = file.read_text(encoding="utf-8").replace("workload:\n", "workload:\n  launch: 3 ms\n", 1)
    file.write_text(text, encoding="utf-8")
    gpu.pack(tmp_path / "results", results.with_suffix(gpu.ARCHIVE))
    before = rows_of(results)
    n_rows, (lacks,) = modules["kept"].predict_again(results)
    assert n_rows == 1
    assert lacks.startswith("peers/sync: cannot be predicted again: peers/sync/scenario.yaml:")
    assert "unknown key 'launch'" in lacks
    assert rows_of(results) == before


@pytest.mark.skipif(sys.platform == "win32", reason="starts processes by a fork server")
def test_what_was_measured_before_a_failure_is_kept(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    common, kept = modules["common"], modules["kept"]
    runs = common.planned(SCENARIO, tmp_path / "good")
    refused = common.planned(SCENARIO | {"schedules": [{"kind": "backup_workers", "backup": 1}]}, tmp_path / "bad")
    rows: list[dict] = []
    part = common.Part(rows.append, True, tmp_path / "kept")
    named = {runs: ("good", {"of": "good"}), refused: ("bad", {"of": "bad"})}
    with pytest.raises(common.PartError, match=r"drops the late: .*; leave --peers out and start torchrun"):
        kept.perform(part, ("real", *named, "--rank", 1, "--peers", "simulated"), 1, named)
    assert [(row["of"], row["kept"]) for row in rows] == [("good", "good/local-2"), ("good", "good/sync")]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.stem)
def test_recorded_results_are_those_of_the_model_of_today(
    modules: dict[str, ModuleType], recorded: Path, tmp_path: Path
) -> None:
    """If the model has changed: `python experiments/gpu/page.py --again --write`, and read the new errors."""
    copy = tmp_path / recorded.name
    shutil.copy(recorded, copy)
    archive = recorded.with_suffix(gpu.ARCHIVE)
    if archive.exists():
        shutil.copy(archive, copy.with_suffix(gpu.ARCHIVE))
    before = rows_of(recorded)
    curves = json.loads(recorded.read_text(encoding="utf-8"))["parts"].get("steps", {"rows": []})["rows"]
    n_rows, lacks = modules["kept"].predict_again(copy)
    assert n_rows == sum("kept" in row for row in before) + sum(row["step_ms"] is not None for row in curves)
    lost = sum("simulated_ms" in row and "kept" not in row for row in before)
    assert lacks == ([f"{recorded.name}: {lost} runs were not kept (cluster, workload and trace)"] if lost else [])
    for row, old in zip(rows_of(copy), before, strict=True):
        for name in ("simulated_ms", "predicted_ms", "two_sizes_ms"):
            if name in old and (name != "simulated_ms" or "kept" in old):
                assert row[name] == pytest.approx(old[name], rel=1e-9), old


# A pretended machine: its host takes 17 ms for a step of any size, its GPU 3 ms and 0.4 ms per sample.
HOST_MS, FIXED_MS, SAMPLE_MS = 17.0, 3.0, 0.4
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def curve(step_ms: Callable[[int], float], sizes: Sequence[int] = SIZES) -> list[dict]:
    about = {"model": "resnet50", "precision": "bf16", "preset": None}
    return [about | {"batch_size": size, "step_ms": step_ms(size)} for size in sizes]


def pretended_ms(batch_size: int) -> float:
    return max(HOST_MS, FIXED_MS + SAMPLE_MS * batch_size)


def test_two_batch_sizes_predict_the_others_of_a_pretended_machine(modules: dict[str, ModuleType]) -> None:
    rows = curve(pretended_ms)
    modules["steps"].predict(rows)
    assert [row["two_sizes_ms"] is None for row in rows] == [row["batch_size"] in (1, 64, 256) for row in rows]
    for row in rows:
        if row["two_sizes_ms"] is not None:
            assert row["two_sizes_ms"] == pytest.approx(row["step_ms"], rel=1e-9), row
    bounds = {row["batch_size"]: row["two_sizes_ms"] for row in rows}
    assert bounds[32] == pytest.approx(HOST_MS)  # bound by launches up to 35 samples
    assert bounds[128] == pytest.approx(FIXED_MS + SAMPLE_MS * 128)
    (verdict,) = modules["verdicts"].verdicts("steps", rows)
    assert verdict.is_held
    assert str(verdict) == "held: steps of other batch sizes of resnet50: +0.0%, limit 10%"


def test_one_sample_that_the_gpu_bounds_is_a_given_size(modules: dict[str, ModuleType]) -> None:
    """A GPU that is slower with few samples: 6 ms each, and 3 ms each from 64 on."""
    rows = curve(lambda size: 6.0 * size if size <= 64 else 192.0 + 3.0 * size)
    modules["steps"].predict(rows)
    assert [row["two_sizes_ms"] for row in rows][:3] == [None, pytest.approx(12.0), pytest.approx(24.0)]


def test_a_host_that_slows_down_misses_the_limit_of_batch_sizes(modules: dict[str, ModuleType]) -> None:
    rows = curve(lambda size: pretended_ms(size) * (1.25 if size == 8 else 1.0))
    modules["steps"].predict(rows)
    assert [str(each) for each in modules["verdicts"].verdicts("steps", rows)] == [
        "MISSED: steps of other batch sizes of resnet50: -20.0%, limit 10%"
    ]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 4, 8, 16), (1, 2, 4)], ids=str)
def test_too_few_batch_sizes_predict_nothing(modules: dict[str, ModuleType], sizes: tuple[int, ...]) -> None:
    rows = curve(pretended_ms, sizes)
    modules["steps"].predict(rows)
    assert {row["two_sizes_ms"] for row in rows} == {None}
    assert modules["verdicts"].verdicts("steps", rows) == ()


def compared(error: float, **about: object) -> dict:
    """Return a row of a compared run whose backward pass is wrong by as much as the makespan."""
    operations = {"backward": (8.0 * (1 + error), 8.0), "copy": (9.0, 0.1), "wait": (0.0, 1.0)}
    return {"error": error, "measured_ms": 10.0, "operations": operations, **about}


MADE = {
    "alone": [
        compared(-0.029, launch_bound=False),
        compared(0.049, launch_bound=True),
    ],
    "peers": [
        *(compared(error, ranks=8, channels=16) for error in (0.02, -0.06, 0.03)),
        compared(0.5, ranks=8, channels=0),
    ],
    "sharding": [{"error": 0.049}, {"error": -0.01}],
    "selection": [
        {"default_kernels_from": 2**25, "kernels_from": 2**22},
        {"recorded_log2_size": 24, "kernels_ms": 3.0, "torch_ms": 1.0},
        {"recorded_log2_size": 26, "kernels_ms": 1.04, "torch_ms": 1.0},
    ],
    "single": [
        {"what": "overhead", "overhead": -0.5, "ddp_ms": 33.0},
        {"what": "plan", "step_ms": 33.3},
    ],
}
SAID = {
    "alone": [
        "held: makespans of steps that the GPU bounds: -2.9%, limit 3%",
        "held: makespans of steps that launches bound: +4.9%, limit 5%",
        "held: times of each kind of operation: +4.9%, limit 10%",
    ],
    "peers": [
        "held: median makespan in a job of 8: +3.0%, limit 3%",
        "held: worst makespan in a job of 8: -6.0%, limit 6%",
    ],
    "sharding": ["held: allocated memory against the column `memory`: +4.9%, limit 5%"],
    "selection": ["held: MSTopK over `torch.topk`, as a run performs them: +4.0%, limit 5%"],
    "single": [
        "held: `real.wrap` over DistributedDataParallel: -50.0%, limit 1%",
        "held: `python -m real` over DistributedDataParallel: +0.9%, limit 1%",
    ],
}


@pytest.mark.parametrize("part", MADE)
def test_parts_say_what_they_hold(modules: dict[str, ModuleType], part: str) -> None:
    assert [str(each) for each in modules["verdicts"].verdicts(part, MADE[part])] == SAID[part]
    assert modules["verdicts"].verdicts(part, []) == ()


@pytest.mark.parametrize(
    ("part", "row", "missed"),
    [
        ("alone", compared(-0.031, launch_bound=False), "makespans of steps that the GPU bounds: -3.1%"),
        ("alone", compared(0.051, launch_bound=True), "makespans of steps that launches bound: [+]5.1%"),
        (
            "alone",
            compared(0.0, launch_bound=False) | {"operations": {"select": (0.8, 1.0)}},
            "each kind of .*: -20.0%",
        ),
        ("peers", compared(0.061, ranks=8, channels=16), "worst makespan in a job of 8: [+]6.1%"),
        ("peers", compared(0.031, ranks=64, channels=16), "median makespan in a job of 64: [+]3.1%"),
        ("sharding", {"error": -0.051}, "allocated memory .*: -5.1%"),
        ("selection", {"recorded_log2_size": 25, "kernels_ms": 1.06, "torch_ms": 1.0}, "MSTopK .*: [+]6.0%"),
        ("single", {"what": "plan", "step_ms": 34.0}, "`python -m real` .*: [+]3.0%"),
    ],
)
def test_parts_say_what_they_miss(modules: dict[str, ModuleType], part: str, row: dict, missed: str) -> None:
    found = modules["verdicts"].verdicts(part, [*MADE[part], row])
    assert any(re.search(f"^MISSED: .*{missed}, limit", str(each)) for each in found), list(map(str, found))


def test_a_miss_is_said_at_the_end(tmp_path: Path) -> None:
    delays, sharding = (part for part in gpu.PARTS if part.name in ("delays", "sharding"))
    results = gpu.Results(tmp_path / "results.json", {})
    results.begin(delays)
    results.begin(sharding)
    assert gpu.summary((delays, sharding), results) == []
    results.add(sharding, {"error": 0.2}, 1.0)
    missed = "MISSED: allocated memory against the column `memory`: +20.0%, limit 5%"
    assert gpu.summary((delays, sharding), results) == ["limits: 0 of 1 are held", f"  sharding: {missed}"]


def checkpoint(folder: Path, parameters: dict[str, list[float]], pieces: dict[str, list[float]]) -> None:
    (folder / "saved").mkdir(parents=True)
    content = {
        "step": 3,
        "model": {name: torch.tensor(values) for name, values in parameters.items()},
        "pieces": {name: (0, torch.tensor(values)) for name, values in pieces.items()},
    }
    torch.save(content, folder / "saved" / "step-000003-rank-00000.pt")


def test_parameters_that_differ_in_the_last_bit_are_not_equal(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    next_up = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    checkpoint(tmp_path / "one", {"a": [1.0, 2.0], "b": [3.0]}, {"c": [1.0], "d": [4.0]})
    checkpoint(tmp_path / "same", {"a": [1.0, 2.0], "b": [3.0]}, {"c": [1.0], "d": [4.0]})
    checkpoint(tmp_path / "other", {"a": [next_up, 2.0], "b": [3.0]}, {"c": [next_up], "e": [4.0]})
    equal = modules["values"]._equal
    assert equal(tmp_path / "one", tmp_path / "same") == (4, 4)
    assert equal(tmp_path / "one", tmp_path / "other") == (1, 5)


def test_one_gpu_is_too_few_and_an_older_nccl_shares_none(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    rows: list[dict] = []
    part = modules["common"].Part(rows.append, False, HERE)
    modules["nccl"].run(part)
    modules["shared_gpu"].run(part)
    assert rows == [
        {"skipped": "needs 2 GPUs or more"},
        {"skipped": "ranks share a GPU over NCCL from 2.30 on; this is 2.28.9"},
    ]


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-h200", "dgx-b200", "dgx-a100", "v100x8-25gbit", "gcp-t4x4-32gbit"])
def test_every_known_gpu_has_a_cluster_for_all_plans(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    jobs = modules["nccl"].jobs
    measured = {
        "device": {"memory_bandwidth": "1 TB/s", "host_bandwidth": "50 GB/s", "floors": {"select": "30 us"}},
        "host": {"launches": {"select": "100 us"}},
    }
    (tmp_path / jobs.ONE_GPU).write_text(yaml.safe_dump(measured), encoding="utf-8")
    assert name in jobs.CLUSTERS.values()
    monkeypatch.setattr(jobs, "preset", lambda: name)
    part = modules["common"].Part(lambda row: None, False, tmp_path)
    for n_ranks in (1, 2, 8, 64, 512):
        rank = min(3, n_ranks - 1)
        late = jobs.troubles(n_ranks, rank, "50 ms")["device, late by 50 ms"]
        document = {
            "cluster": jobs.cluster(part, n_ranks),
            "workload": SCENARIO["workload"],
            "disturbances": late if n_ranks > 1 else [],
            "schedules": jobs.schedules(n_ranks),
            "steps": 2,
        }
        scenario = loads(yaml.safe_dump(document))
        assert scenario.cluster.world_size == n_ranks
        assert scenario.cluster.device.memory_bandwidth_Bps == 1e12
        assert scenario.cluster.host.launches.select_s == 1e-4
        assert len(scenario.schedules) == (6 if n_ranks > 1 else 4)


@pytest.mark.parametrize(("n_gpus", "n_ranks"), [(2, 2), (3, 2), (7, 4), (8, 8), (16, 8)])
def test_ranks_are_a_power_of_two(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, n_gpus: int, n_ranks: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    assert modules["nccl"]._n_ranks() == n_ranks


@pytest.mark.full  # the dry run of `tools/gpu.py` has four
@pytest.mark.skipif(sys.platform == "win32", reason="ends processes by signals")
def test_two_ranks_go_the_way_of_several_gpus(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(modules["nccl"], "DRY_RANKS", 2)
    rows: list[dict] = []
    modules["nccl"].run(modules["common"].Part(rows.append, True, tmp_path))
    assert [row["outcome"] for row in rows if row["what"] != "plan" and row["what"] != "order"] == ["passed"] * 7
    plans = [row for row in rows if row["what"] == "plan"]
    assert len(plans) == 12
    assert {row["ranks"] for row in plans} == {2}
    assert all((tmp_path / row["kept"] / "trace.real.npz").exists() for row in plans)
