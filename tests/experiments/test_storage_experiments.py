"""Accelerators that wait for storage: the experiments hold what their pages say of it."""

import math
from functools import cache
from itertools import islice

import pytest
from scripts import ROOT, load_script

from simdist.report import insert_tables, markdown_table
from simdist.runs.building import build
from simdist.scenario import load
from simdist.scenario.warnings import warnings_of

EXPERIMENTS = ROOT / "experiments"

mlperf = load_script(EXPERIMENTS / "mlperf_storage" / "run.py")
efs = load_script(EXPERIMENTS / "efs_k80" / "run.py")
datacache = load_script(EXPERIMENTS / "datacache" / "run.py")

EACH = pytest.mark.parametrize("run", [mlperf, efs, datacache], ids=lambda run: run.HERE.name)


@cache
def page(run):
    return (run.HERE / "README.md").read_text(encoding="utf-8")


@EACH
def test_scenario_of_an_experiment_loads_without_a_warning(run):
    assert warnings_of(load(run.HERE / "scenario.yaml")) == ()


# --- MLPerf Storage ----------------------------------------------------------------------------------------------


def test_page_shows_the_tables_of_what_the_formula_says_and_leaves_out():
    shown = {
        "formula": markdown_table(mlperf.formula_table()),
        "varying": markdown_table(mlperf.varying_table()),
        "latency": markdown_table(mlperf.latency_table()),
    }
    assert insert_tables(page(mlperf), shown) == page(mlperf)


@pytest.mark.parametrize("table", [mlperf.most_table, mlperf.published_table])
def test_page_shows_the_first_rows_of_longer_tables(table):
    assert markdown_table(islice(table(), 5)) in page(mlperf)


@pytest.mark.parametrize("n_accelerators", [1, 3, 11])
@pytest.mark.parametrize("bandwidth_Bps", [0.3e9, 5e9])
def test_utilisation_of_records_of_one_size_is_share_over_demand(n_accelerators, bandwidth_Bps):
    each = mlperf.EVEN["unet3d-a100"]
    expected = min(1.0, bandwidth_Bps / n_accelerators / (7 * 146_600_628 / 0.636))
    ours = mlperf.utilisation(mlperf.scenario(each, bandwidth_Bps, n_accelerators))
    assert ours == pytest.approx(expected, rel=1e-12)


def test_records_have_the_mean_and_the_deviation_of_the_benchmark():
    each = mlperf.LOADS["unet3d-a100"]
    drawn = mlperf.scenario(each, 1e9, 40).input.data.sizes_nbytes()
    mean = math.fsum(drawn) / len(drawn)
    deviation = math.sqrt(math.fsum((size - mean) ** 2 for size in drawn) / len(drawn))
    assert mean == pytest.approx(146_600_628, rel=0.01)
    assert deviation == pytest.approx(68_341_808, rel=0.05)


def test_reading_further_ahead_never_harms_one_accelerator():
    each = mlperf.LOADS["unet3d-h100"]
    runs = [mlperf.scenario(each, each.demand_Bps, 1, prefetch=depth) for depth in mlperf.DEPTHS]
    shares = [mlperf.utilisation(run) for run in runs]
    assert shares == sorted(shares)
    assert shares[-1] <= mlperf.drawn_utilisation(runs[-1]) < 1


@pytest.mark.parametrize(("row", "predicted"), [(0, 71), (1, 36), (6, 37)])
def test_resnet50_on_a_drive_that_delivers_what_it_states_is_predicted_within_one_accelerator(row, predicted):
    published = mlperf.PUBLISHED["submissions"]["rows"][row]
    assert mlperf.LOADS[published["workload"]].most(published["peak_Bps"]) == predicted
    assert published["accelerators"] - predicted == 1


# --- TensorFlow on K80 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "model"),
    [("Amazon EC2", "AlexNet"), ("Amazon EC2", "VGG16"), ("Google Compute Engine", "AlexNet")],
)
def test_page_shows_the_rows_of_both_machines(machine, model):
    assert "\n".join(efs.row(machine, model, n_gpus) for n_gpus in efs.GPUS) in page(efs)


def test_page_shows_several_machines():
    shown = [line for line in page(efs).splitlines() if line.startswith("| ResNet-50 | 64 |")]
    row = next(row for row in efs.PUBLISHED["clusters"]["rows"] if (row["model"], row["batch"]) == ("ResNet-50", 64))
    rates = [efs.cluster_rate(efs.cluster(row, n_machines)) for n_machines in efs.MACHINES]
    assert [line.split(" | ")[4] for line in shown] == [f"{rate:.0f}" for rate in rates]
    assert warnings_of(load(efs.HERE / "cluster.yaml")) == ()


def test_what_resnet_misses_on_many_machines_does_not_depend_on_its_batch():
    of = {row["batch"]: row for row in efs.PUBLISHED["clusters"]["rows"] if row["model"] == "ResNet-50"}
    for place in (2, 3):
        missing_s = [
            efs.MACHINES[place] * 8 * batch / row["images_per_s"][place] - 8 * batch / row["machine"]
            for batch, row in of.items()
        ]
        assert missing_s[0] == pytest.approx(missing_s[1], rel=0.05)


def test_alexnet_on_8_gpus_is_bound_by_efs():
    ours = efs.images_per_s(efs.scenario("Amazon EC2", "AlexNet", 8))
    assert 0.99 < ours / (100 * 2**20 / 114_660) <= 1
    assert ours < 0.2 * efs.PUBLISHED["machines"]["Amazon EC2"]["synthetic"]["AlexNet"][3]


def test_decoding_bounds_alexnet_on_8_gpus_where_the_disk_does_not():
    scenario = efs.scenario("Amazon EC2", "AlexNet", 8, bandwidth_Bps=math.inf)
    assert efs.images_per_s(scenario) == pytest.approx(32 / 7.89e-3, rel=1e-9)


def test_published_rows_of_alexnet_need_more_than_efs_is_stated_to_deliver():
    published = efs.PUBLISHED["machines"]["Amazon EC2"]
    needed = [rate * efs.RECORD_NBYTES / published["bandwidth_Bps"] for rate in published["real"]["AlexNet"][1:3]]
    assert needed == pytest.approx([1.34, 2.41], abs=0.01)


# --- DataCache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["naive", "memory"])
def test_page_shows_the_epochs_of_one_node(policy):
    assert datacache.epochs_row(1, policy) in page(datacache)


def test_page_shows_what_an_epoch_takes_at_least():
    shown = {"limits": markdown_table(datacache.limits_table())}
    assert insert_tables(page(datacache), shown) == page(datacache)


def test_plans_that_are_not_proved_for_every_row_can_be():
    scenario = datacache.on(2).changed(steps=2)
    assert build(scenario, datacache.named("datacache")).n_proved_ranks == scenario.cluster.world_size
