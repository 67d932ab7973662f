"""docs/reference/data-dictionary.md names every column and key that is written, with its type, and no other.

The page is made from docstrings by tools/dictionary.py. A small study is planned, simulated, compared, converted and,
by a copy of its traces, validated; every list of the page is compared with the columns found there. A new column gets a
line in the `Columns:` of the docstring of the function that makes it. A new table also gets a heading and a marker in
the page, and a line in one of the functions `of_...` below: the heading, and the columns found by `keys`, `columns` or
`arrays`.
"""

import contextlib
import dataclasses
import io
import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import learners
import numpy as np
import pandas as pd
import pytest
from commandline import write
from data_sets import DATA_CLUSTER
from failed_runs import write_failed_run
from kineto_traces import Delay, Truth, write_job
from scripts import ROOT, load_script
from traced_plans import write_traces

from real.calibration.calls import CallTimes
from real.calibration.data import DataRates
from real.calibration.output import raw_results
from real.calibration.tables import Measurement, MeasuringTask
from real.data.tallies import totals
from real.execution.running import RunReport
from simdist.cli import main
from simdist.drafts.calibrated_links import calibrate_links
from simdist.drafts.counted_model import count_model
from simdist.learning import training
from simdist.plan.group import Group
from simdist.runs import run_directory
from simdist.runs.building import delays as delays_of
from simdist.scenario import Range, dump_cluster, load, loads
from simdist.scenario.by_name import read_cluster
from simdist.stragglers import find_gains, find_slowdown
from simdist.studies.comparison import Row, compare, frame
from simdist.studies.data_knobs import knob_effects
from simdist.studies.epochs import find_epochs
from simdist.studies.validated_run import validate_run
from simdist.studies.validation import validate
from simdist.traces import waiting
from simdist.traces.attempts import ATTEMPTS, Absence, AttemptLog, Pause
from simdist.traces.breakdown import break_down
from simdist.traces.reads import expected
from simdist.traces.trace import Trace

dictionary = load_script(ROOT / "tools" / "dictionary.py")
PAGE = dictionary.PAGE
PROFILES = ROOT / "tests" / "data" / "profiles"

STUDY = f"""{DATA_CLUSTER}\
workload:
  tensors: [{{name: weight, count: 100000}}]
  batch_size: 4
  sample_size: 1 kB
  forward: 2 ms
  measured_batch_size: 4
input: {{source: storage, data: {{samples: 32, file_size: 100 kB}}}}
checkpoint: {{every: 2, what: parameters}}
steps: 2 epochs
train_for: 90 epochs
disturbances:
  - {{kind: transient, probability: 30%, delay: 5 ms}}
  - {{kind: transient, on: compute, probability: 30%, delay: 5 ms}}
  - {{kind: transient, on: io, probability: 30%, delay: 5 ms}}
  - {{kind: persistent, on: link, link: nic, share: 20%, begin: 1 ms}}
schedules:
  - {{kind: sync, input: {{policy: naive}}}}
  - {{kind: local_sgd, period: 2, input: {{policy: staged}}}}
"""

SACCT = """\
JobID|State|Start|End|Elapsed|AllocTRES
7|NODE_FAIL|2026-03-01T00:00:00|2026-03-01T09:00:00|09:00:00|gres/gpu=16,node=2
7|FAILED|2026-03-01T09:10:00|2026-03-01T09:10:30|00:00:30|gres/gpu=16,node=2
7|COMPLETED|2026-03-01T10:00:00|2026-03-01T19:00:00|09:00:00|gres/gpu=16,node=2
"""

SWEEP = """\
scenario: study.yaml
cases:
  - {name: small, workload.batch_size: 4}
  - {name: too large for the data set, workload.batch_size: 16}
vary: {cluster.nodes: [1, 2]}
seeds: 2
"""

CALM = """\
cluster: {nodes: 2, gpus_per_node: 2, fabric: ideal, network: {latency: 25 us, bandwidth: 25 Gbit/s}}
workload: {tensors: [{name: weight, count: 100000}], batch_size: 4, forward: 2 ms}
steps: 20
schedules: [{kind: sync}]
"""
RANDOM = "disturbances: [{kind: transient, probability: 10%, delay: 50 ms}]\n"
SAVING = (
    CALM.replace("nodes: 2,", "nodes: 2, disk: {read: 1 GB/s, write: 1 GB/s},")
    + """\
checkpoint: {every: 2, what: parameters, to: disk}
"""
)

DROPPING = """\
cluster: {nodes: 2, gpus_per_node: 1, fabric: ideal, network: ideal}
workload: {tensors: [{name: all, count: 9}], batch_size: 1, forward: 1 s}
steps: 4
schedules: [{kind: backup_workers, backup: 1}, {kind: local_sgd, period: 2, inner_steps: {1: 1}}, {kind: naive_ag}]
"""

SHARDED = """\
cluster: {nodes: 2, gpus_per_node: 1, fabric: ideal, network: ideal}
workload: {tensors: [{name: all, count: 9}], batch_size: 1, forward: 1 s}
steps: 2
schedules: [fsdp, sync]
"""

FAILING = """\
cluster: {nodes: 2, gpus_per_node: 1, fabric: ideal, network: ideal, storage: {latency: 2 ms, bandwidth: 1 GB/s}}
workload: {tensors: [{name: all, count: 9}], batch_size: 1, forward: 1 s}
steps: 2
train_for: 60 days
checkpoint: {every: 100, size: 5 GB}
failures:
  causes: [{cause: gpu, of: gpu, rate: 1 per day, effect: node}]
  recovery: {detect: 1 min, schedule: 20 min}
  on_failure: continue
  step_factor: 1.02
  uncertain:
    causes[0].rate: {from: 0.5 per day, to: 2 per day, source: guessed}
    recovery.schedule: {from: 10 min, to: 30 min, source: guessed}
schedules: [sync, local-4]
"""
RECORDED = """\
cluster: {nodes: 2, gpus_per_node: 1, fabric: ideal, network: ideal}
workload: {tensors: [{name: all, count: 9}], batch_size: 1, forward: 1 s}
steps: 2
train_for: 100 steps
failures: {causes: [{cause: recorded, effect: process, at: [20 s]}]}
schedules: [sync]
"""

Found = dict[str, set[str]]
"""Column or key -> the types of its values."""


def documented() -> dict[str, dict[str, frozenset[str]]]:
    """Return the types of the columns of the page, by heading."""
    parts = re.split(r"^##+ (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.M)
    line = re.compile(r"^\* (`\w+`(?:, `\w+`)*) \(([^)]*)\): .", re.M)
    found = {}
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        rows = [(name, kind) for names, kind in line.findall(text) for name in names.replace("`", "").split(", ")]
        if "<!-- columns" in text:
            table = {name: type_names(kind) for name, kind in rows}
            assert len(table) == len(rows), f"{heading}: a name stands there twice"
            found[heading.replace("`", "")] = table
    return found


def type_names(text: str) -> frozenset[str]:
    """Return the types of a column; of an array `int64 [loads, 4]`, dtype and number of dimensions."""
    array = re.fullmatch(r"(\w+) \[(.*)\]", text)
    if array:
        return frozenset({f"{array[1]} {array[2].count(',') + 1}"})
    return frozenset(text.split(" or "))


# ---------------------------------------------------------------- what is found


def keys(records: Iterable[Mapping[str, object]]) -> Found:
    """Return the keys of JSON objects."""
    names = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "object", type(None): "null"}
    found: Found = {}
    for record in records:
        for key, value in record.items():
            found.setdefault(key, set()).add(names[type(value)])
    return found


def columns(table: pd.DataFrame) -> Found:
    """Return the columns of a frame; text is `str`, however this version of pandas calls it."""
    return {
        str(name): {"str" if str(column.dtype) in {"object", "str", "string"} else str(column.dtype)}
        for name, column in table.items()
    }


def arrays(path: Path) -> Found:
    """Return the arrays of an .npz file."""
    with np.load(path) as archive:
        return {name: {f"{archive[name].dtype} {archive[name].ndim}"} for name in archive.files}


def result(*args: object, code: int = 0) -> dict:
    """Return the result of a command, which ends with an exit code."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        ended = main([*map(str, args), "--json"])
    assert ended == code, err.getvalue()
    return json.loads(out.getvalue())


def each(rows: Sequence[Mapping[str, list]], key: str) -> list:
    """Return what the lists under a key of several objects hold."""
    return [value for row in rows for value in row[key]]


@dataclass(frozen=True)
class Study:
    """A scenario, and a folder with its runs, each with two traces."""

    scenario: Path
    runs: Path

    @property
    def run(self) -> Path:
        return self.runs / "sync+naive"

    @property
    def trace(self) -> Trace:
        return Trace.load(self.run / run_directory.SIMULATED)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("study")
    made = Study(write(folder / "study.yaml", STUDY), folder / "runs")
    result("simulate", made.scenario, "-o", made.runs)
    for run in run_directory.find(made.runs):
        trace = Trace.load(run / run_directory.SIMULATED)
        dataclasses.replace(trace, source="real gloo on cpu").save(run / run_directory.REAL)
        expected(trace.plan).save(run / run_directory.REAL_READS)
    return made


def of_plans_and_simulations(study: Study, folder: Path) -> dict[str, Found]:
    presets, one = result("presets"), result("presets", "clusters", "ideal")
    started = result("init", "-o", folder / "started.yaml", "--cluster", "ideal", "--workload", "mlp")
    of_model = ("--cluster", "ideal", "--from", "counted_models:tied")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tests" / "user_modules"))
        counted = result("init", "-o", folder / "counted.yaml", "--forward", "1 ms", *of_model)
    measured = ("--cluster", "dgx-a100", "--nodes", 2, "--workload", "mlp", "--from", nccl_tests(folder))
    calibrated = result("init", "-o", folder / "calibrated.yaml", *measured)
    log = write(folder / "sacct.txt", SACCT)
    logged = result("init", "-o", folder / "logged.yaml", "--cluster", "ideal", "--workload", "mlp", "--from", log)
    passes = write(folder / "passes.yaml", CALM.replace("batch_size: 4", "batch_size: 4, micro_batches: 2"))
    stream = "schedules: [{kind: diloco, period: 2, fragments: 2, overlap_steps: 1, mixing: 0.5}]\n"
    late = write(folder / "stream.yaml", re.sub("(?s)schedules:.*", stream, CALM))
    plans = [each for path in (passes, late) for each in result("plan", path)["plans"]]
    plans += result("plan", study.scenario, "-o", folder / "plans")["plans"]
    simulated = result("simulate", study.scenario)["rows"] + result("simulate", study.run)["rows"]
    converted = result("trace", study.run, "--trace", "simulated", "--chrome", folder / "chrome.json")
    dropping = write(folder / "dropping.yaml", DROPPING)
    plans += result("plan", dropping)["plans"]
    simulated += result("simulate", dropping, "-o", folder / "dropped")["rows"]
    dropped = result("trace", folder / "dropped" / "backup-1", "--chrome", folder / "dropped.json")
    return {
        "simdist init": keys([started, counted, calibrated, logged]),
        "Logged failures": keys([logged["failures"]]),
        "A rate of failures": keys(logged["failures"]["rates"]),
        "A part of a recovery": keys(logged["failures"]["recovery"]),
        "A setting of a new scenario": keys(started["settings"]),
        "A cluster that ships": keys(presets["clusters"]),
        "A workload that ships": keys(presets["workloads"]),
        "Rates of failures that ship": keys(presets["failures"]),
        "A scenario that ships": keys(presets["scenarios"]),
        "One preset": keys([one]),
        "A plan": keys(plans),
        "Proof": keys(each(plans, "proved")),
        "A simulated schedule": keys(simulated),
        "A trace that was converted": keys([converted, dropped]),
    }


def of_comparisons(study: Study, folder: Path) -> dict[str, Found]:
    found = result("compare", study.scenario, "--seeds", 2)
    rows = found["rows"]
    alone = result("compare", study.scenario, "--seeds", 1)["rows"]
    open_ends = CALM.replace("Gbit/s}", "Gbit/s}, uncertain: {network.latency: {from: 20 us, to: 30 us}}")
    unsure = result("compare", write(folder / "unsure.yaml", open_ends))["rows"]
    unsure += result("compare", write(folder / "dropping.yaml", DROPPING), "--baseline", "local_sgd")["rows"]
    unsure += result("compare", write(folder / "sharded.yaml", SHARDED), "--baseline", "fsdp")["rows"]
    unsure += result("compare", write(folder / "failing.yaml", FAILING), "--seeds", 1)["rows"]
    return {
        "simdist compare": keys([found]),
        "A schedule among others": keys(rows + alone + unsure),
        "An epoch of a schedule": keys(each(rows, "epochs")),
    }


def of_validations(study: Study, folder: Path) -> dict[str, Found]:
    found = result("validate", study.runs)
    rows = found["rows"]
    cluster = load(study.scenario).cluster
    low, high = 0.9 * cluster.network.latency_s, 1.1 * cluster.network.latency_s
    ranges = {"network.latency": Range.model_validate({"from": f"{low} s", "to": f"{high} s"})}
    file = write(folder / "unsure-cluster.yaml", dump_cluster(cluster.model_copy(update={"uncertain": ranges})))
    unsure = result("validate", study.runs, "--cluster", file)["rows"]
    servers = re.sub("(?s)schedules:.*", "schedules: [{kind: parameter_server, servers: 1, apart: true}]\n", CALM)
    result("plan", write(folder / "apart.yaml", servers), "-o", folder / "apart")
    one = Path(shutil.copytree(run_directory.find(study.runs)[0], folder / "one-real-rank"))
    trace = run_directory.read_trace(one / run_directory.REAL)
    run_directory.save_trace(dataclasses.replace(trace, real_rank=0), one / run_directory.REAL)
    unsure += result("validate", one)["rows"]
    failed = write_failed_run(folder / "failed")
    unsure += result("validate", failed)["rows"]
    whole = validate_run(run_directory.read(failed)).attempts
    assert whole is not None
    without_one = dataclasses.replace(whole, simulated_absences=((1, 3, 5),))
    with_failures = [unsure[-1]["failures"], json.loads(json.dumps(without_one.document()))]
    failures = json.loads((failed / run_directory.FAILURES).read_text())
    absences = (Absence(1, 3, 7.0), Absence(1, 3, 7.0, last_step=5, started_s=8.0, ready_s=9.0))
    gone_on = json.loads(AttemptLog(absences=absences, pauses=(Pause(7.0),)).dumps())
    attempts = [json.loads((failed / ATTEMPTS).read_text()), gone_on]
    return {
        "A run with failures": keys(with_failures),
        "Where the time of a run with failures went": keys(each(with_failures, "categories")),
        "Keys of failures.json": keys([failures]),
        "A failure at the start of a step": keys([*each([failures], "failures"), {"resume_before": 1}]),
        "Keys of attempts.json": keys(attempts),
        "An attempt": keys(each(attempts, "attempts")),
        "A failure that has struck": keys(each(attempts, "met")),
        "A rank that was absent": keys(each(attempts, "absences")),
        "A pause of the others": keys(each(attempts, "pauses")),
        "A validated run": keys(rows + unsure),
        "A run that is only simulated": keys(result("validate", folder / "apart")["rows"]),
        "A kind of operation, simulated and measured": keys(each(rows, "kinds")),
        "Injected delays": keys(each(rows, "injections")),
        "The blame of a rank": keys(each(rows, "blames")),
        "A link that held operations up": keys(each(rows, "links")),
        "The order of schedules": keys([found["summary"]]),
        "A schedule in that order": keys(found["summary"]["rows"]),
        "The error of an epoch": keys(each(rows, "epochs")),
    }


def of_collectives(study: Study, _: Path) -> dict[str, Found]:
    rows = result("trace", study.runs, "--collectives")["rows"]
    traces = each(rows, "traces")
    return {
        "The collectives of a run": keys(rows),
        "The collectives of a trace": keys(traces),
        "A kind of collective": keys(each(traces, "collectives")),
    }


def of_limits(study: Study, _: Path) -> dict[str, Found]:
    found = [
        result("compare", study.scenario, "--tolerable", "--loss", loss, "--seeds", "1") for loss in ("50%", "0.0001%")
    ]
    return {"simdist compare --tolerable": keys(found), "Tolerable stragglers": keys(each(found, "rows"))}


def of_goodput(_: Study, folder: Path) -> dict[str, Found]:
    found = []
    for number, text in enumerate((FAILING, RECORDED)):
        (folder / f"{number}.yaml").write_text(text, encoding="utf-8")
        found.append(result("goodput", folder / f"{number}.yaml", "--price", "2", "--seeds", "2"))
    rows, curves = each(found, "rows"), each(found, "curves")
    return {
        "simdist goodput": keys(found),
        "Goodput of a schedule": keys(rows),
        "A curve of goodput": keys(curves),
        "A point of a curve of goodput": keys(each(curves, "points")),
    }


def of_workloads(_: Study, __: Path) -> dict[str, Found]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tests" / "user_modules"))
        found = [count_model(f"counted_models:{name}").document() for name in ("tied", "convolution")]
    return {"A counted model": keys(found), "Tensors of a model": keys(each(found, "tensors"))}


def nccl_tests(folder: Path) -> Path:
    """Write a table of nccl-tests and return its file."""
    rows = "8 2 float sum -1 40.0 1 1 0\n1073741824 268435456 float sum -1 12000 89.48 167.77 0\n"
    file = folder / "nccl-tests.txt"
    file.write_text(f"# all_reduce_perf\n# size count type redop root time algbw busbw #wrong\n{rows}")
    return file


def of_calibration(_: Study, folder: Path) -> dict[str, Found]:
    found = [calibrate_links(nccl_tests(folder), read_cluster("dgx-a100"), nodes=2).document()]
    return {"Calibrated links": keys(found), "A size of a table": keys(each(found, "rows"))}


def of_data(study: Study, _: Path) -> dict[str, Found]:
    rows = (
        result("whatif", study.runs, "--data", "--knobs")["rows"] + result("whatif", study.scenario, "--data")["rows"]
    )
    knobs = [row["knobs"] for row in rows if row["knobs"]]
    traces = each(rows, "traces")
    return {
        "How a schedule loads its data": keys(rows),
        "The loading of a trace": keys(traces),
        "An epoch of a trace": keys(each(traces, "epochs")),
        "Lower bounds of an epoch": keys(each(rows, "limits")),
        "Knobs": keys(knobs),
        "Effect of a knob": keys(each(knobs, "effects")),
    }


def of_sweeps(study: Study, folder: Path) -> dict[str, Found]:
    done = folder / "sweep"
    sweep = write(study.scenario.with_name("sweep.yaml"), SWEEP)
    finished = result("sweep", sweep, "-o", done, "--workers", 0, code=1)
    planned = result("sweep", sweep, "-o", folder / "planned", "--workers", 0, "--plans", code=1)
    points = [json.loads(path.read_text()) for path in (folder / "planned").rglob("point.json")]
    dropping = write(folder / "dropping.yaml", "{scenario: drops.yaml, baseline: local_sgd, vary: {steps: [4]}}")
    write(folder / "drops.yaml", DROPPING)
    result("sweep", dropping, "-o", folder / "dropped", "--workers", 0)
    sharded = write(folder / "shards.yaml", "{scenario: shared.yaml, baseline: fsdp, vary: {seed: [0, 1]}}")
    write(folder / "shared.yaml", SHARDED)
    result("sweep", sharded, "-o", folder / "shards", "--workers", 0)
    remarks = result("results", folder / "shards")["remarks"]
    failing = write(folder / "fails.yaml", "{scenario: failing.yaml, vary: {steps: [2, 4]}}")
    write(folder / "failing.yaml", FAILING)
    result("sweep", failing, "-o", folder / "failed", "--workers", 0)
    everything = [done, study.runs, folder / "dropped", folder / "failed"]
    alone, both = (result("results", *some) for some in ([done], everything))
    fastest = keys(result("results", done, "--fastest")["rows"])
    varied = {"cluster.nodes", "workload.batch_size", "steps"}
    rows = keys(both["rows"])
    assert varied <= rows.keys()
    return {
        "A finished sweep": keys([finished, planned]),
        "A point of runs": keys(points),
        "A remark": keys(remarks),
        "Results": keys([alone, both]),
        "A result": {name: types for name, types in rows.items() if name not in varied},
        "The fastest schedule of a point": {name: types for name, types in fastest.items() if name not in rows},
    }


def of_reports(study: Study, folder: Path) -> dict[str, Found]:
    found = result("report", study.runs, "-o", folder / "report.html")
    sweep = write(study.scenario.with_name("reported.yaml"), SWEEP)
    result("sweep", sweep, "-o", folder / "reported", "--workers", 0, code=1)
    of_sweep = result("report", folder / "reported", "-o", folder / "sweep.html")
    return {
        "A report": keys([found]),
        "A run in a report": keys(found["runs"]),
        "A report of a sweep": keys([of_sweep]),
    }


SHARDED_JOB = """
cluster:
  nodes: 1
  gpus_per_node: 2
  fabric: {latency: 3 us, bandwidth: 20 GB/s}
  network: ideal
workload:
  tensors:
    - {name: layers.0.w, count: 8000000, forward: 5 ms, backward: 9 ms}
    - {name: layers.1.w, count: 8000000, forward: 6 ms, backward: 10 ms}
  batch_size: 1
  optimize: 12 ms
host: {run_ahead_steps: null}
steps: 6
schedules: [fsdp]
"""
COLLECTIVES_OF_RANKS = """\
rank,Collective name,Group size,dtype,In msg nelems,Out msg nelems,dur_mean,operation_count
0,_allgather_base,2,BFloat16,1000,2000,LATE,10
1,_allgather_base,2,BFloat16,1000,2000,300.0,10
0,_reduce_scatter_base,2,Float,2000,1000,LATE,6
1,_reduce_scatter_base,2,Float,2000,1000,300.0,6
"""


def of_imports(_: Study, folder: Path) -> dict[str, Found]:
    sizes_unknown = ("--tensors", "resnet18", "--cluster", "ideal")
    sharded = _import_of_a_sharded_job(folder)
    found = [
        result("import", PROFILES / "slow", "-o", folder / "slow.yaml"),
        result("import", PROFILES / "late", *sizes_unknown, "-o", folder / "late.yaml"),
        *_imports_of_recurring_delays(folder),
        sharded,
    ]
    of_delays = ("stragglers", "repeated", "common")
    places = [delay["place"] for name in of_delays for delay in each(found, name) if delay["place"]]
    return {
        "An imported job": keys(found),
        "A measured step and its prediction": keys(job["step"] for job in found),
        "An undisturbed step": keys(job["base"] for job in found),
        "Where a step goes": keys(job["where"] for job in found),
        "The kind of job": keys(job["job"] for job in found),
        "Collectives in the traces": keys(each(found, "collectives")),
        "A straggler in the traces": keys(each(found, "stragglers")),
        "The place of a delay": keys(places),
        "Shares of a step that are lost": keys(job["lost"] for job in found),
        "A repeated delay": keys(each(found, "repeated")),
        "A delay of all ranks at once": keys(each(found, "common")),
        "A sharded model": keys([sharded["sharding"]]),
        "A unit of a sharded model": keys(sharded["sharding"]["units"]),
        **_summary_of_collectives(folder),
    }


def _import_of_a_sharded_job(folder: Path) -> dict:
    (folder / "sharded").mkdir()
    write_traces(folder / "sharded", loads(SHARDED_JOB))
    return result("import", folder / "sharded", "-o", folder / "sharded-job.yaml")


def _summary_of_collectives(folder: Path) -> dict[str, Found]:
    """Import two tables of collectives; in the second no rank is late."""
    found = []
    for name, seconds in (("late", 900.0), ("even", 300.0)):
        (folder / name).mkdir()
        table = write(folder / name / "nccl_summary_long.csv", COLLECTIVES_OF_RANKS.replace("LATE", str(seconds)))
        found.append(result("import", table, "-o", folder / "none.yaml", code=2))
    return {
        "A summary of collectives": keys(found),
        "Collectives in a summary": keys(each(found, "collectives")),
    }


def _imports_of_recurring_delays(folder: Path) -> list[dict]:
    """Import jobs in which delays come again: of one rank, of all ranks, and of a rank without a trace."""
    of_all = tuple(Delay("io", rank, step, 0.4) for rank in range(4) for step in (3, 7))
    of_one = tuple(Delay("host", 0, step, 0.15) for step in (2, 9, 16))
    uneven = tuple(Delay("compute", 1, step, 0.15) for step in (4, 13))
    unseen = tuple(Delay("compute", 2, step, 0.15) for step in (3, 14))
    found = []
    for name, delays, missing in (("seen", of_all + of_one + uneven, ()), ("unseen", unseen, (2,))):
        truth = Truth(n_steps=20, delays=delays, missing=missing)
        (folder / name).mkdir()
        write_job(folder / name, truth, device="cuda")
        found.append(result("import", folder / name, "--nodes", 1, "-o", folder / f"{name}.yaml"))
    return found


def of_whatifs(study: Study, folder: Path) -> dict[str, Found]:
    result("import", PROFILES / "slow", "-o", folder / "recorded.yaml")
    calm = write(folder / "calm.yaml", CALM)
    found = [result("whatif", job, "--resamples", 40) for job in (study.scenario, calm, folder / "recorded.yaml")]
    found.append(result("whatif", calm, "--resamples", 0, "--cluster", "ideal"))
    dropping = write(folder / "dropping.yaml", DROPPING)
    found.append(result("whatif", dropping, "--schedule", "local-2-uneven", "--schedules", "backup-1"))
    gains = [job["gains"] for job in found if job["gains"]]
    return {
        "The slowdown of a job": keys(found),
        "How a loss is spread": keys(job["pattern"] for job in found),
        "Cost of a kind of operation": keys(each(found, "kinds")),
        "Cost of a rank": keys(each(found, "ranks")),
        "The slowdown of a step": keys(each(found, "by_step")),
        "What repairing a link would gain": keys(each([job for job in found if "links" in job], "links")),
        "Gains of other schedules": keys(gains),
        "The gain of a schedule": keys(each(gains, "rows")),
    }


def of_tuning(_: Study, folder: Path) -> dict[str, Found]:
    calm = write(folder / "calm.yaml", CALM)
    noisy = write(folder / "noisy.yaml", f"{SAVING}disturbances: [{{kind: transient, probability: 5%, delay: 5 ms}}]\n")
    found = [
        result("tune", calm, "--global-every", 2, "--micro-batches", "1,2"),
        result("tune", noisy, "--global-every", 2, "--group-every", "2:1", "--max-bytes", "1 MB", "--seeds", 2),
    ]
    of_rows = {field.name for field in dataclasses.fields(Row)}
    rows = keys(each(found, "rows"))
    return {
        "A search for a schedule": keys(found),
        "The constraints of a search": keys(search["constraints"] for search in found),
        "A finalist": {name: types for name, types in rows.items() if name not in of_rows},
    }


def of_learning(_: Study, folder: Path) -> dict[str, Found]:
    job = write(folder / "learnt.yaml", CALM.replace("kind: sync}", "kind: sync}, {kind: local_sgd, period: 2}"))
    how = ["--task", "toy", "--workers", 0, "--seeds"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_COMMAND", learners.COMMAND)
        plain = result("learn", job, *how, 1)
        found = [result("learn", job, *how, 2, "--target", f"accuracy >= {value}") for value in (0.3, 0.99)]
        raced = result("tune", job, *how, 2, "--only", "sync", "--target", "accuracy >= 0.3")
    learnt, rows = keys([plain, *found]), keys(each([plain, *found], "rows"))
    return {
        "Schedules that learn": learnt,
        "A schedule that learns": rows,
        "A curve of a schedule that learns": keys(each([plain, *found], "curves")),
        "A search by time to a target": {key: types for key, types in keys([raced]).items() if key not in learnt},
        "A finalist by time to a target": {key: each for key, each in keys(raced["rows"]).items() if key not in rows},
    }


def of_chakra(_: Study, folder: Path) -> dict[str, Found]:
    calm = write(folder / "calm.yaml", CALM)
    exported = result("plan", calm, "--chakra", folder / "traces")["exports"]
    return {"An export": keys(exported)}


def of_frames(study: Study, _: Path) -> dict[str, Found]:
    trace = study.trace
    scenario = load(study.scenario)
    late = loads(CALM.replace("{kind: sync}", "{kind: sync}, {kind: local_sgd, period: 2}") + RANDOM)
    sync, local = late.schedules
    return {
        "Breakdown.frame": columns(break_down(trace).frame()),
        "Trace.frame": columns(trace.frame()),
        "simdist.traces.waiting.rank_table": columns(waiting.rank_table(trace)),
        "Waiting.frame": columns(waiting.attribute_waiting(trace).frame()),
        "Epochs.frame": columns(find_epochs(trace).frame()),
        "Gains.frame": columns(find_gains(late, [local], baseline=sync, n_runs=40).frame()),
        "Slowdown.frame": columns(find_slowdown(trace, ranks_per_node=2).frame()),
        "KnobEffects.frame": columns(knob_effects(scenario, scenario.schedules[0], delays_of(scenario)).frame()),
    }


def of_runs(study: Study, _: Path) -> dict[str, Found]:
    return {
        "Arrays of the delays": arrays(study.run / run_directory.DELAYS),
        "Arrays of a trace": arrays(study.run / run_directory.SIMULATED),
        "Arrays of what was read": arrays(study.run / run_directory.REAL_READS),
    }


def of_measurements(*_: object) -> dict[str, Found]:
    clocks = ((0.0, 0.0), (0.0, 0.0))
    of_ranks = totals(np.zeros((2, 1, 10), dtype=np.int64))
    told = [
        RunReport(
            *("run", "digest", "emulated", precision, "gloo", "cpu", ("host",), {"torch": "2"}),
            *(1.0, clocks, clocks, (8, 8), allocated, {"grad.0": "groups"}, 0.0, 0.0, reads, links),
        )
        for precision, allocated, reads, links in ((None, None, None, None), ("bf16", (9, 9), of_ranks, "none"))
    ]
    rates = DataRates(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, None, 1.0, "unknown")
    measured = [Measurement(MeasuringTask("all_reduce", "node", Group(2), 250), (0.1, 0.2))]
    calls = CallTimes(1e-5, 2e-5, 4e-5)
    more = {"rates": rates, "calls": calls}
    calibrated = json.loads(raw_results(measured, source="", nodes=1, ranks_per_node=2, gap_s=0.02, **more))
    return {
        "Keys of real.json": keys(json.loads(report.dumps()) for report in told),
        "Sums of what was read": keys([of_ranks]),
        "A calibration": keys([calibrated]),
        "A measured collective": keys(calibrated["measurements"]),
        "Rates of storage": keys([calibrated["data"]]),
        "Times of a call": keys([calibrated["calls"]]),
    }


EVERYTHING = (
    of_plans_and_simulations,
    of_comparisons,
    of_validations,
    of_collectives,
    of_data,
    of_limits,
    of_goodput,
    of_workloads,
    of_calibration,
    of_imports,
    of_whatifs,
    of_tuning,
    of_learning,
    of_chakra,
    of_sweeps,
    of_reports,
    of_frames,
    of_runs,
    of_measurements,
)

# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def found(study: Study, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder = tmp_path_factory.mktemp("found")
    return {heading: table for collect in EVERYTHING for heading, table in collect(study, folder).items()}


def test_every_table_of_the_dictionary_was_found_and_no_other(found: dict[str, Found]) -> None:
    assert documented().keys() == found.keys()


@pytest.mark.parametrize("heading", documented())
def test_a_table_names_what_is_written_with_its_types_and_nothing_else(heading: str, found: dict[str, Found]) -> None:
    table = documented()[heading]
    assert table.keys() == found[heading].keys(), f"{heading}: {sorted(table.keys() ^ found[heading].keys())}"
    for name, types in found[heading].items():
        assert types <= table[name], f"{heading}: {name} is {types}"


def test_the_page_is_that_of_the_docstrings() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert dictionary.updated(text) == text, "run python tools/dictionary.py"


def test_docstrings_give_columns_their_types_meanings_and_links() -> None:
    (first, *_) = dictionary.columns("simdist.studies.run_collectives.RunCollectives.document", "traces")
    assert first == dictionary.Columns(("which",), "str", "`simulated` or `measured`.")
    shared = dictionary.columns("simdist.studies.ranking.SummaryRow")[1]
    assert shared == dictionary.Columns(("simulated_s", "measured_s"), "float", "Makespan.")
    marker = "<!-- columns simdist.studies.run_collectives.RunCollectives.document -->\n"
    assert "[The collectives of a trace](#the-collectives-of-a-trace)" in dictionary.updated(
        f"### The collectives of a trace\n\n{marker}"
    )


def test_a_marker_without_such_a_docstring_is_an_error() -> None:
    with pytest.raises(LookupError, match="no section Columns of rows:"):
        dictionary.updated("<!-- columns simdist.studies.run_collectives.RunCollectives.document rows -->\n")


def test_frames_that_have_the_columns_of_a_command_have_all_of_them(study: Study) -> None:
    tables = documented()
    rows = frame(compare(load(study.scenario), baseline="sync+naive", n_seeds=2))
    of_some = {"epochs", "added_s", "links_s", "shares", "late", "gradients_used"}
    of_some |= {"step_s_range90", "speedup_range90", "memory_nbytes", "memory_of_nbytes"}
    of_some |= {"goodput", "ettr", "goodput_range90"}
    of_facets = {"epoch_first_s", "epoch_last_s", "checkpoints_add_s", "links_add_s"}
    pairs = {"step_s_ci95", "speedup_ci95"}
    ends = {"step_s_ci95_low", "step_s_ci95_high", "speedup_ci95_low", "speedup_ci95_high"}
    assert set(rows.columns) == (tables["A schedule among others"].keys() - of_some - pairs) | of_facets | ends
    assert ends <= tables["A result"].keys()
    kinds = validate(study.trace, study.trace, run_directory.read(study.run).delays).frame()
    assert set(kinds.columns) == tables["A kind of operation, simulated and measured"].keys()
