"""Run directories: everything that both backends need to execute one plan, and the traces of its runs.

    plan.json               the operations of each rank
    scenario.yaml           the prices and the origin of the plan; needs no other file of the user
    delays.npz              the injected delays: channel -> float64 [steps, world_size], seconds
    failures.json           the injected failures by step, if the scenario has any
    recording-0.npz, ...    recordings that scenario.yaml replays, if any
    trace.simulated.npz     the simulated run; all `trace.*.npz` belong to this plan
    trace.real.npz          the run on real machines
    real.json               the machines and clocks of that run
    real-reads.npz          the levels of storage that its samples came from, if the plan has a data set
    trace.partial.npz       a run that ended early; NaN for operations that did not run
    partial-reads.npz       the reads of that run; 0 for loads that did not run
    attempts.json           with failures: the attempts of the run on real machines, and the failures that struck
    trace.attempt-0.npz     with failures: an attempt that failed; trace.real.npz has all together

The bytes of each file follow from its contents: equal scenarios give equal directories. `plan.json` is written last, so
a directory with this file is complete. Files with other contents are overwritten only on request. Reading checks that
the files belong together, because a trace in a mixed-up directory would look like any other.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
from numpy.typing import NDArray

from simdist import plan as plans
from simdist import scenario as scenarios
from simdist.arrays import Declared, open_arrays
from simdist.errors import PlanError, RunError, ScenarioError, TraceError, naming_file
from simdist.files import locked, read_content, replacing, sync
from simdist.plan import Channel, Plan
from simdist.plan.check import check
from simdist.plan.delays import Delays, check_delays, delay_shapes
from simdist.plan.failures import StepFailure, dump_step_failures, read_step_failures
from simdist.plan.only_simulated import only_restarts, only_simulated
from simdist.scenario import Recorded, Scenario
from simdist.scenario.disturbances import read_recorded
from simdist.scenario.links import LinkRecorded
from simdist.settings.base import unchecked_copy
from simdist.traces.attempts import ATTEMPTS
from simdist.traces.trace import Trace, write_npz

if TYPE_CHECKING:
    from simdist.traces.reads import Reads

PLAN = "plan.json"
SCENARIO = "scenario.yaml"
DELAYS = "delays.npz"
FAILURES = "failures.json"
SIMULATED = "trace.simulated.npz"
REAL = "trace.real.npz"
PARTIAL = "trace.partial.npz"
TRACES = {"simulated": SIMULATED, "real": REAL}
REPORT = "real.json"
REAL_READS = "real-reads.npz"
PARTIAL_READS = "partial-reads.npz"
#: All files that a measurement may leave.
MEASURED = (REAL, REPORT, REAL_READS, PARTIAL, PARTIAL_READS)
NO_LINKS = "none"
"""In real.json: what links do was left out."""
#: The program that takes as long as the scenario states. The source of its traces ends with this word.
EMULATED = "emulated"
_CHANNELS: tuple[Channel, ...] = get_args(Channel)
_AGAIN = "delete it, or measure the run again with --force"
_HOW = "`simdist plan SCENARIO -o RUN` writes one"


@dataclass(frozen=True)
class RunDirectory:
    """The contents of a run directory.

    Args:
        path: The directory.
        scenario: Its scenario, with the one schedule of this plan.
        plan: The plan to execute.
        delays: Those of one seed, see `simdist.plan.delays`.
        failures: Those of the seed of the scenario, in the order in which they strike.
    """

    path: Path
    scenario: Scenario
    plan: Plan
    delays: Delays
    failures: tuple[StepFailure, ...] = ()

    @property
    def only_simulated(self) -> str | None:
        """What of the run only the simulator can do, why, and what to write instead; None if real ranks can do all."""
        if self.scenario.actors:
            kinds = ", ".join(each.kind_in_files() for each in self.scenario.actors)
            return (
                f"actors ({kinds}) can be simulated only: they are processes of the simulation, and no rank performs "
                f"them; remove `actors`, or leave this run out"
            )
        failures = self.scenario.failures
        if failures and failures.on_failure == "continue" and (reason := only_restarts(self.plan)):
            return reason
        if failures and failures.recovery.state == "replica":
            return (
                "failures.recovery.state: replica can be simulated only: ranks go on from files; write checkpoint, or "
                "leave this run out"
            )
        return only_simulated(self.plan)

    @property
    def others_go_on(self) -> bool:
        """Whether ranks go on when others fail, until these are back."""
        return self.scenario.failures is not None and self.scenario.failures.on_failure == "continue"


def find(path: Path) -> list[Path]:
    """Return the run directories at `path`: itself, or those inside it at any depth.

    Raises:
        ScenarioError: There is no run directory.
    """
    found = inside(path)
    if not found:
        raise ScenarioError(f"{path}: is no run directory: it has no {PLAN}, nor has a directory in it; {_HOW}")
    return found


def inside(path: Path) -> list[Path]:
    """Return the run directories at `path`, as `find` does; none if there are none."""
    return [path] if (path / PLAN).exists() else sorted(file.parent for file in path.rglob(PLAN))


def write(
    path: Path,
    scenario: Scenario,
    plan: Plan,
    delays: Delays,
    failures: Sequence[StepFailure] = (),
    *,
    force: bool = False,
) -> None:
    """Write a run directory.

    Args:
        path: The directory; created if missing.
        scenario: The scenario, with the one schedule of the plan.
        plan: The plan to execute.
        delays: Those of one seed, see `simdist.plan.delays`.
        failures: Failures to inject.
        force: Replace an existing run and delete its traces.

    Raises:
        PlanError: The directory contains another run.
        RunError: The directory cannot be written.
    """
    files = contents(scenario, plan, delays, failures)
    try:
        different = _differences(path, plan, files)
        if different and not force:
            raise PlanError(f"{different}; choose another directory with -o, or replace what is there with --force")
        path.mkdir(parents=True, exist_ok=True)
        with locked(path) if different else nullcontext():
            if different:
                of_runs = (path / name for name in (FAILURES, ATTEMPTS, REPORT, REAL_READS, PARTIAL_READS))
                for old in (path / PLAN, *of_runs, *path.glob("trace.*.npz")):
                    old.unlink(missing_ok=True)
            for name, content in files.items():
                with replacing(path / name) as part:
                    part.write_bytes(content)
    except OSError as error:
        raise RunError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from None


def read(path: Path) -> RunDirectory:
    """Read a run directory and check that its files belong together.

    Raises:
        ScenarioError: A file is missing, or scenario.yaml is invalid.
        PlanError: The plan or the delays are invalid, or do not match.
        TraceError: A trace or the reads of a run are damaged, or belong to another plan.
    """
    missing = [name for name in (PLAN, SCENARIO, DELAYS) if not (path / name).exists()]
    if missing:
        raise ScenarioError(f"{path}: is no run directory: {' and '.join(missing)} missing; {_HOW}")
    plan = plans.load(path / PLAN)
    scenario = scenarios.load(path / SCENARIO)
    _check_plan(path, plan, scenario)
    delays = read_delays(path / DELAYS, plan)
    for file in [*sorted(path.glob("trace.*.npz")), path / REAL_READS]:
        try:
            if file.name != REAL_READS:
                read_trace(file, plan=plan)
            elif file.exists():
                read_reads(file, plan=plan)
        except TraceError as error:
            raise TraceError(f"{error}, or delete it") from None
    failures = read_step_failures(path / FAILURES, plan) if (path / FAILURES).exists() else ()
    return RunDirectory(path, scenario, plan, delays, failures)


def read_delays(path: Path, plan: Plan) -> dict[Channel, NDArray[np.float64]]:
    """Read the delays of a run, finite and not negative, see `simdist.plan.delays`.

    If a step has several micro-batches, arrays may have an axis for them after that of the steps.

    Columns:
        host, compute, io (float64 [steps, world_size]): Seconds of delay.

    Raises:
        PlanError: The file is damaged or contains something else.
    """
    needed = [Declared(np.dtype(np.float64), shape[1:]) for shape in delay_shapes(plan)]
    try:
        with open_arrays(path) as file:
            for name in file.names:
                if name not in _CHANNELS or (found := file.declared(name)) not in needed:
                    what = f"{found.dtype} {found.shape}" if name in _CHANNELS else "no channel of delays"
                    takes = f"{needed[0].dtype} {needed[0].shape}, steps and ranks, of {', '.join(_CHANNELS)}"
                    raise PlanError(f"{name} is {what}; {path.parent / PLAN} takes {takes}")
            arrays = {name: file.read(name, most_nbytes=needed[-1].nbytes) for name in file.names}
        delays = {channel: arrays[channel][np.newaxis] for channel in _CHANNELS if channel in arrays}
        check_delays(plan, delays)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except Exception as error:  # a dozen types: numpy, zipfile and tokenize each raise their own for damaged files
        raise PlanError(f"{path}: cannot be read as delays ({error}); {_HOW}") from None
    return delays


def read_trace(path: Path, *, plan: Plan | None = None) -> Trace:
    """Read a trace, and check that it belongs to `plan` if one is given.

    Raises:
        TraceError: The trace is damaged, or belongs to another plan.
    """
    trace = Trace.load(path)
    if plan is not None and trace.plan.digest() != plan.digest():
        raise TraceError(
            f"{path}: is a trace of plan {trace.plan.name} ({trace.plan.digest()[:12]}); {path.parent / PLAN} is "
            f"{plan.name} ({plan.digest()[:12]}): move the trace away"
        )
    return trace


def save_trace(trace: Trace, path: Path, *, on_disk: bool = False) -> None:
    """Write a trace; an interruption leaves the old file or none.

    Raises:
        RunError: It cannot be written.
    """
    with replacing(path, on_disk=on_disk) as part:
        trace.save(part)


def save_measured(path: Path, trace: Trace, *, report: str | None, reads: "Reads | None" = None) -> None:
    """Write the results of a run, the trace first; an interruption or full disk leaves the old files or the new ones.

    All files are on the disk before the first is renamed. If the process is killed between two renames,
    `read_real_report` still finds the report of the trace.

    Args:
        path: The run directory.
        trace: Trace of the run.
        report: The contents of real.json; None for a run that ended early.
        reads: Reads of the run, if it has a data set.

    Raises:
        RunError: A file cannot be written.
    """
    trace_name, reads_name = (PARTIAL, PARTIAL_READS) if report is None else (REAL, REAL_READS)
    with ExitStack() as stack:  # exits in reverse order

        def write(name: str, save: Callable[[Path], object]) -> None:
            part = stack.enter_context(replacing(path / name, on_disk=True))
            with naming_file(path / name):
                save(part)
                sync(part)

        if report is not None:
            write(REPORT, lambda part: part.write_text(report, encoding="utf-8"))
        if reads:
            write(reads_name, reads.save)
        else:  # reads of an earlier run would count as those of this one
            stack.push(lambda kind, *_: None if kind else (path / reads_name).unlink(missing_ok=True))
        write(trace_name, trace.save)


def as_measured(run: RunDirectory, real: Trace) -> RunDirectory:
    """Return a run as its trace `real` was measured: without changes of links, if the measurement left them out.

    Raises:
        TraceError: See `read_real_report`.
    """
    left_out = (read_real_report(run.path, real) or {}).get("links") == NO_LINKS
    return replace(run, scenario=run.scenario.without_links()) if left_out and run.scenario.has_links else run


def read_real_report(path: Path, trace: Trace) -> Mapping[str, object] | None:
    """Return the contents of real.json for the measured trace of a run directory; None if there is no such file.

    Raises:
        TraceError: The file is damaged, or belongs to another run.
    """
    # From a run that was killed when it had renamed the trace, but no other file.
    parts = [] if any(path.glob(f".{REAL_READS}.*.part")) else sorted(path.glob(f".{REPORT}.*.part"))
    runs: list[object] = []
    for file in (path / REPORT, *parts):
        try:
            found = json.loads(read_content(file))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise TraceError(f"{file}: cannot be read ({error}); {_AGAIN}") from None
        if not isinstance(found, dict):
            raise TraceError(f"{file}: holds no object of JSON; {_AGAIN}")
        runs.append(found.get("run", ""))
        if runs[-1] == trace.run:
            return found
    if runs:
        raise TraceError(f"{path / REPORT}: is of run {runs[0]!r}, {REAL} of run {trace.run!r}; {_AGAIN}")
    return None


def read_reads(path: Path, *, plan: Plan) -> "Reads":
    """Read the counts of a run of `plan`: its reads from each level of storage.

    Raises:
        TraceError: The file is damaged, or belongs to another plan.
    """
    from simdist.traces.reads import Reads

    reads = Reads.load(path)
    try:
        reads.check(plan)
    except TraceError as error:
        raise TraceError(f"{path}: {error}: move the file away") from None
    return reads


def contents(scenario: Scenario, plan: Plan, delays: Delays, failures: Sequence[StepFailure] = ()) -> dict[str, bytes]:
    """Return the bytes of each file of a run directory, by name; the plan is last."""
    standalone, recordings = _standalone(scenario)
    return {
        **{name: _npz({"seconds": seconds}) for name, seconds in recordings.items()},
        SCENARIO: scenarios.dump(standalone).encode(),
        DELAYS: _npz({str(channel): array[0] for channel, array in delays.items()}),
        **({FAILURES: dump_step_failures(failures).encode()} if failures else {}),
        PLAN: plans.dumps(plan).encode(),
    }


def _standalone(scenario: Scenario) -> tuple[Scenario, dict[str, NDArray[np.float64]]]:
    """Make the scenario read its recordings from files next to it; return these files by name."""
    disturbances = list(scenario.disturbances)
    recordings = {}
    for number, disturbance in enumerate(disturbances):
        if isinstance(disturbance, Recorded | LinkRecorded):
            name = f"recording-{number}.npz"
            recordings[name] = read_recorded(disturbance) if isinstance(disturbance, Recorded) else disturbance.table()
            disturbances[number] = unchecked_copy(disturbance, file=Path(name))
    return unchecked_copy(scenario, disturbances=tuple(disturbances)), recordings


def _npz(arrays: Mapping[str, NDArray[np.float64]]) -> bytes:
    """Return the bytes of an .npz file with the arrays."""
    file = io.BytesIO()
    write_npz(file, dict(sorted(arrays.items())))
    return file.getvalue()


def _differences(path: Path, plan: Plan, files: Mapping[str, bytes]) -> str | None:
    """Describe how a directory differs from the files to write; None if files are only missing or equal."""
    if (path / PLAN).exists():
        try:
            there = plans.load(path / PLAN)
        except PlanError:
            return f"{path / PLAN}: is there already and cannot be read"
        if there.digest() != plan.digest():
            return (
                f"{path / PLAN}: holds another plan, {there.name} ({there.digest()[:12]}) instead of {plan.name} "
                f"({plan.digest()[:12]})"
            )
    for name, content in files.items():
        old = path / name
        if name != PLAN and old.exists() and (old.stat().st_size != len(content) or old.read_bytes() != content):
            return f"{old}: is there already with other contents"
    return None


def _check_plan(path: Path, plan: Plan, scenario: Scenario) -> None:
    """Refuse a plan that is invalid or belongs to another scenario. Sizes come first: they bound the other checks."""
    file = path / PLAN
    beside = path / SCENARIO
    needed = {"world_size": scenario.cluster.world_size, "steps": scenario.steps}
    for name, found in {"world_size": plan.world_size, "steps": plan.n_steps}.items():
        if found != needed[name]:
            raise PlanError(
                f"{file}: {name} is {found}; {beside} has {needed[name]}: these files are of different runs"
            )
    try:
        check(plan)
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None
    n_tensors = len(scenario.workload.tensors)
    for buffer in plan.buffers:
        if buffer.tensors and buffer.tensors[1] > n_tensors:
            raise PlanError(
                f"{file}: buffer {buffer.name!r} holds tensors {buffer.tensors[0]}:{buffer.tensors[1]}; the workload "
                f"of {beside} has {n_tensors}: these files are of different runs"
            )
