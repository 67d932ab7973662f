"""The command line of the real backend, which torchrun starts once per rank.

Rank 0 prints what there is to tell; an error is printed by every rank that meets it, in one line. Exit codes are those
of `simdist`: 0; 1 for a run that failed; 2 for wrong input.
"""

import hashlib
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import click
import torch

from real import models
from real.gpu import Spin
from real.launch import Connection, connect, place
from real.memory import Memory
from real.programs.base import Program
from real.programs.binding import Binding
from real.programs.emulated import EmulatedProgram
from real.programs.module import ModuleProgram
from real.running import Report, check_world, forget, perform, rescue
from real.timing import share_cores, sleep_s
from simdist import rundir
from simdist.cost import Local, Shared, price
from simdist.errors import PlanError, RunError, ScenarioError, SimdistError
from simdist.plan import COLLECTIVES, Op, Plan, reads, writes
from simdist.rundir import RunDirectory
from simdist.trace import Trace
from simdist.units import format_seconds

__all__ = ["main"]

PARTS = "parts"
EMULATED = "emulated"
_DAY_S = 86_400.0
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Options:
    """What the command line asks for."""

    runs: tuple[Path, ...]
    program: str
    precision: str
    backend: Literal["auto", "gloo", "nccl"]
    device: Literal["auto", "cpu", "cuda"]
    timeout_s: float
    label: str | None
    force: bool


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line on one rank and return its exit code."""
    rank = os.environ.get("RANK", "?")
    try:
        code = _command.main(args, prog_name="python -m real", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        return _say(rank, error.format_message(), 2)
    except click.Abort:
        return _say(rank, "interrupted", 130)
    except SimdistError as error:
        if "--debug" in (args or sys.argv):
            traceback.print_exc()
        return _say(rank, str(error), 1 if isinstance(error, RunError) else 2)


def _say(rank: str, message: str, code: int) -> int:
    print(f"real: rank {rank}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


@click.command(
    help="Perform the plan of each of RUNS (or of every run directory in it); torchrun starts this once per rank."
)
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--program",
    default=EMULATED,
    show_default=True,
    help=f"What computes: {EMULATED} sleeps for the scenario's compute times; or a model: {', '.join(models.names())}.",
)
@click.option("--precision", type=click.Choice(list(_AUTOCAST)), default="fp32", show_default=True, help="Of a model.")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1, max=_DAY_S),
    default=60.0,
    show_default=True,
    help="Seconds to wait for others.",
)
@click.option("--schedule", default=None, help="Only the run of this schedule.")
@click.option("--force", is_flag=True, help="Replace a trace that is there.")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
def _command(
    runs: tuple[Path, ...],
    program: str,
    precision: str,
    backend: Literal["auto", "gloo", "nccl"],
    device: Literal["auto", "cpu", "cuda"],
    timeout: float,
    schedule: str | None,
    force: bool,
    debug: bool,
) -> int:
    _execute(_Options(runs, program, precision, backend, device, timeout, schedule, force))
    return 0


def _execute(options: _Options) -> None:
    if math.isnan(options.timeout_s):
        raise ScenarioError("--timeout nan: write seconds")
    if options.program not in (EMULATED, *models.names()):
        raise ScenarioError(
            f"--program {options.program}: there is no such program; there are {EMULATED}, {', '.join(models.names())}"
        )
    here = place(os.environ)
    runs = _runs(options)
    for each in runs:
        check_world(each.plan, here.world_size)
    share_cores(here.local_world_size)
    with (
        connect(
            backend=options.backend, device=options.device, timeout_s=options.timeout_s, exit_with_parent=True
        ) as connection,
        connection.guard.ending_on_sigterm(),
    ):
        for each in runs:
            _one(connection, each, options)


def _runs(options: _Options) -> list[RunDirectory]:
    """Read the run directories, and refuse those that have a real trace already, unless forced."""
    for path in options.runs:
        if not path.is_dir():
            raise ScenarioError(f"{path}: there is no such run directory; `simdist plan SCENARIO -o RUN` writes one")
    found = [rundir.read(path) for given in options.runs for path in rundir.find(given)]
    runs = [each for each in found if options.label in (None, each.scenario.schedules[0].name)]
    if not runs:
        labels = ", ".join(each.scenario.schedules[0].name for each in found)
        where = ", ".join(map(str, options.runs))
        raise ScenarioError(f"{where}: no run is labelled {options.label!r}; there are: {labels}")
    for each in runs:
        if (each.path / rundir.REAL).exists() and not options.force:
            raise ScenarioError(f"{each.path / rundir.REAL}: is there already; replace it with --force")
    return runs


def _one(connection: Connection, run: RunDirectory, options: _Options) -> None:
    parts, rank = run.path / PARTS, connection.place.rank
    forget(parts, rank)  # what an earlier start has left must not end up in a trace of this one
    _agree(connection, run, options)
    try:
        done = perform(
            connection,
            run.plan,
            run.delays,
            buffers=_buffers(run.plan, options),
            program=_program(connection, run, options),
            program_name=options.program if options.program == EMULATED else f"{options.program} {options.precision}",
            timeout_s=options.timeout_s,
            parts=parts,
        )
        if done:
            _save(run, *done)
        connection.barrier("the trace is written")
    except (PlanError, ScenarioError):
        raise
    except Exception as error:
        raise _failure(connection, run, error) from error
    except KeyboardInterrupt:
        _keep(run)
        raise
    forget(parts, rank)
    if done:
        print(_summary(run, *done), flush=True)


def _agree(connection: Connection, run: RunDirectory, options: _Options) -> None:
    """Refuse ranks that were given different runs: with other delays, say, the trace would tell of none of them."""
    connection.agree("plan", run.plan.digest())
    for name, content in rundir.contents(run.scenario, run.plan, run.delays).items():
        connection.agree(name, hashlib.sha256(content).hexdigest())
    connection.agree("program", f"{options.program} {options.precision}")


def _save(run: RunDirectory, trace: Trace, report: Report) -> None:
    (run.path / rundir.REPORT).write_text(report.dumps(), encoding="utf-8")
    rundir.save_trace(trace, run.path / rundir.REAL)
    (run.path / rundir.PARTIAL).unlink(missing_ok=True)


def _failure(connection: Connection, run: RunDirectory, error: Exception) -> RunError:
    """Tell the other ranks, keep what was done, and return the error for this rank to end with."""
    explained = error if isinstance(error, RunError) else RunError(f"{run.plan.name}: {type(error).__name__}: {error}")
    with _undisturbed():
        connection.guard.fail(str(explained))
    return RunError(f"{explained}{_keep(run)}")


def _keep(run: RunDirectory) -> str:
    """Save the times of what was done; return how that went, to end a sentence with."""
    path = run.path / rundir.PARTIAL
    try:
        with _undisturbed():
            partial = rescue(run.path / PARTS, run.plan)
            if partial is None:
                return ""
            rundir.save_trace(partial, path)
    except (RunError, OSError) as error:
        return f"; what was done is lost ({error})"
    return f"; what was done is in {path}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore the signals by which torchrun and Ctrl-C end all ranks: this one ends already."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _summary(run: RunDirectory, trace: Trace, report: Report) -> str:
    step = format_seconds(trace.makespan_s / run.plan.n_steps)
    return (
        f"{run.plan.name}: {run.plan.world_size} ranks, {run.plan.n_steps} steps, {step} a step ({trace.source}); "
        f"tracing took {100 * report.tracing_share:.2g} %; wrote {run.path / rundir.REAL}"
    )


def _buffers(plan: Plan, options: _Options) -> set[str]:
    """Return the buffers that need memory: a program that only sleeps needs those that are sent."""
    if options.program != EMULATED:
        return Binding.buffers_of(plan)
    sent: set[str] = set()
    for op in (op for body in plan.bodies for op in body if isinstance(op, COLLECTIVES)):
        sent.update(_touched(op))
    return sent


def _touched(op: Op) -> tuple[str, ...]:
    return (*reads(op), *writes(op))


def _program(
    connection: Connection, run: RunDirectory, options: _Options
) -> Callable[[Memory, threading.Event], Program]:
    rank = connection.place.rank

    def make(memory: Memory, failed: threading.Event) -> Program:
        if options.program == EMULATED:
            on_gpu = connection.device.type == "cuda"
            hold = Spin(connection.device) if on_gpu else partial(sleep_s, interrupted=failed)
            return EmulatedProgram(_seconds(run, rank), hold, failed)
        workload = run.scenario.workload
        job = models.build(
            options.program, batch_size=workload.batch_size, device=connection.device, dtype=torch.float32, seed=0
        )
        program = ModuleProgram(
            run.plan,
            job.module,
            job.loss,
            job.optimizer,
            lambda step: job.batch(step, rank),
            memory,
            device=connection.device,
            autocast=_AUTOCAST[options.precision],
            saved=run.path / "saved" if rank == 0 else None,
        )
        program.warm_up(3)
        return program

    return make


def _seconds(run: RunDirectory, rank: int) -> Mapping[Op, float]:
    """Return what the operations that do not communicate take on a rank, by the scenario's costs."""
    costs = price(run.plan, run.scenario.cluster, run.scenario.workload)
    seconds: dict[Op, float] = {}
    for op, cost in costs.of.items():
        match cost:
            case Local():
                seconds[op] = float(cost.seconds) if isinstance(cost.seconds, float) else float(cost.seconds[rank])
            case Shared() if not isinstance(op, COLLECTIVES):
                seconds[op] = float(cost.alone_s) if isinstance(cost.alone_s, float) else float(cost.alone_s[rank])
    return seconds
