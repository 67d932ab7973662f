"""Reports while a job trains which rank is late, by how much, and which step to trace.

    watch = real.watch(model, csv="lateness.csv", report=SummaryWriter())
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        watch.step()
    watch.close()

`real.watching.work` defines what is measured, and `real.watching.lateness` who is late. A step that ends no window
costs a few microseconds: no exchange, no access to the store, no wait for the GPU. The watch never ends a job. If it
fails, it warns once and does no more.
"""

import atexit
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerAction

from real.watching.background import WatchThread, WindowMoments
from real.watching.exchange import StoreExchange
from real.watching.lateness import LatenessWindow, import_lateness
from real.watching.meetings import attach, unseen
from real.watching.module_hooks import Handle
from real.watching.output import Report, check_csv, check_report, tell
from real.watching.tracing import TraceMark
from real.watching.work import CudaStepClock, HostStepClock, StepClock, StepMoments, WorkRecorder
from simdist.errors import RunError, ScenarioError

_FEWEST_STEPS = 10  # of a window; fewer tell little from noise
_WARM_UP_STEPS = 2  # of a profiler, before the marked step
_END_S = 5.0  # at the end of a job, for the times of other ranks
_FAILED_END_S = 1.0  # the same after an error of the script
_NO_WAITS = "no rank has waited for another so far, so a late one is not visible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """Options of a watch.

    Args:
        every: Steps of a window. After each window, ranks exchange their times.
        csv: File to which rank 0 appends a row for each rank and window.
        report: Rank 0 reports each window to it: a function of a `LatenessWindow`, a `SummaryWriter` of TensorBoard, or
            the module `wandb` or one of its runs. Without it and `csv`, rank 0 prints each window.
        timeout_s: Limit for each wait for other ranks, in the background.

    Raises:
        ScenarioError: A value is invalid.
        TypeError: `report` cannot take windows.
    """

    every: int = 50
    csv: Path | str | None = None
    report: Report | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.every < _FEWEST_STEPS:
            raise ScenarioError(
                f"every={self.every}; write {_FEWEST_STEPS} steps or more: fewer tell little from noise"
            )
        if self.timeout_s <= 0:
            raise ScenarioError(f"timeout_s={self.timeout_s}; write seconds, more than 0")
        check_report(self.report)


def watch(
    module: nn.Module | None = None,
    *,
    first_step: int = 0,
    every: int = 50,
    csv: Path | str | None = None,
    report: Report | None = None,
    timeout_s: float = 60.0,
) -> "StepWatch":
    """Watch a training loop for late ranks. All ranks call this, after `init_process_group`.

    Args:
        module: The model that the loop calls: a `DistributedDataParallel` or sharded one. Other models wait for other
            ranks where the loop says so, in `watch.waiting()`.
        first_step: Number of the first step, if the job resumes.
        every: Steps of a window. After each window, ranks exchange their times.
        csv: File to which rank 0 appends a row for each rank and window.
        report: Rank 0 reports each window to it: a function of a `LatenessWindow`, a `SummaryWriter` of TensorBoard, or
            the module `wandb` or one of its runs. Without it and `csv`, rank 0 prints each window.
        timeout_s: Limit for each wait for other ranks, in the background.

    Returns:
        The watch. Call its `step()` at the end of each step, and `close()` at the end of the loop.

    Raises:
        ScenarioError: A value is invalid, or the CSV file has other columns.
        UnsupportedError: `real.wrap` made the model, and has an option for this.
        RunError: The process group is missing, or the CSV file cannot be written.
        TypeError: `report` cannot take windows.
    """
    options = Watching(every=every, csv=csv, report=report, timeout_s=timeout_s)
    device = next((each.device for each in module.parameters()), torch.device("cpu")) if module else None
    return StepWatch(options, first_step=first_step, device=device, module=module)


@final
class StepWatch:
    """Watches the steps of a loop. `watch` makes it.

    Args:
        options: Options of the watch.
        first_step: Number of the first step.
        device: Device that computes. None takes the current GPU, if there is one.
        module: The model. None if the loop says where it waits.

    Attributes:
        current_step: The current step, or the next one between two steps.
        window: The lateness of the last window that was reported. None before, and on other ranks than 0.

    Raises:
        ScenarioError: The first step is invalid, or the CSV file has other columns.
        UnsupportedError: `real.wrap` made the model.
        RunError: The process group is missing, or the CSV file cannot be written.
    """

    def __init__(
        self,
        options: Watching,
        *,
        first_step: int = 0,
        device: torch.device | None = None,
        module: nn.Module | None = None,
    ) -> None:
        if first_step < 0:
            raise ScenarioError(f"first_step={first_step}; steps count from 0")
        rank, world_size = _place()
        csv = Path(options.csv) if options.csv is not None and rank == 0 else None
        if csv is not None:
            check_csv(csv)
        clock = _clock(device)
        self.current_step = first_step
        self.window: LatenessWindow | None = None
        self._options = options
        self._first_step = first_step
        self._closed = False
        self._told = False
        self._report_to = options.report
        if options.report is None and options.csv is None:
            self._report_to = _print
        not_seen = unseen(module) if module is not None and world_size > 1 else ""
        self._recorder: WorkRecorder[Any] = WorkRecorder(clock)
        self._windows = _Windows(self._recorder, not_seen, has_others=world_size > 1)
        exchange = None
        if world_size > 1:
            exchange = StoreExchange(dist.distributed_c10d._get_default_store(), rank, world_size)
        if rank == 0:
            import_lateness()
        self._handles: Sequence[Handle] = attach(module, self._recorder) if module is not None else ()
        self._thread: WatchThread[Any] = WatchThread(
            clock,
            exchange,
            rank=rank,
            csv=csv,
            timeout_s=options.timeout_s,
            earliest=self._earliest_to_trace,
        )
        atexit.register(self._close_at_exit)
        if not_seen and rank == 0:
            _warn(not_seen)

    def waiting(self) -> AbstractContextManager[None]:
        """Mark an exchange with other ranks that the script performs itself.

            with watch.waiting():
                dist.all_reduce(gradient)

        The time inside is waiting, not work.
        """
        return nullcontext() if self._closed or self._thread.is_off else self._recorder.waiting()

    def step(self) -> None:
        """End a step. Each rank calls this at the end of each step, after `optimizer.step()`."""
        if self._closed or self._thread.is_off:
            self._end_early()
            self.current_step += 1
            return
        self._windows.end_step(self.current_step)
        self.current_step += 1
        if (self.current_step - self._first_step) % self._options.every == 0:
            self._thread.put(self._windows.end())
        if self._thread.results:
            self._report()

    @property
    def trace_mark(self) -> TraceMark | None:
        """The step that a trace should be taken of, and the rank that is late there. None if there is none."""
        return self._thread.mark

    @property
    def should_trace(self) -> bool:
        """Whether the current step belongs to a trace of the marked step."""
        mark = self._thread.mark
        return mark is not None and mark.first_step <= self.current_step <= mark.last_step

    def schedule(self, step: int) -> ProfilerAction:
        """Return the action of `torch.profiler.profile(schedule=watch.schedule)` in a step, on all ranks.

        Args:
            step: Number of the step since the profiler was made, as the profiler counts.
        """
        mark = self._thread.mark
        if mark is None:
            return ProfilerAction.NONE
        step += self._first_step
        if step == mark.last_step:
            return ProfilerAction.RECORD_AND_SAVE
        if mark.first_step <= step < mark.last_step:
            return ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == mark.first_step - 1 else ProfilerAction.NONE

    def scalars(self) -> dict[str, float]:
        """Return the numbers of the last window, by name. Empty before the first one, and on other ranks than 0."""
        return self.window.scalars() if self.window is not None else {}

    def close(self) -> None:
        """Report the steps since the last window, and remove the hooks. Waits for other ranks for at most 5 seconds."""
        self._close(_END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(_END_S if error is None else _FAILED_END_S)

    def _close_at_exit(self) -> None:
        self._close(_FAILED_END_S)

    def _close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        self._remove_hooks()
        self._thread.put(self._windows.end(is_last=True))
        self._thread.close(min(timeout_s, self._options.timeout_s))
        self._report()
        self._end_early()

    def _report(self) -> None:
        """Report what is new, in the thread of the loop."""
        while self._thread.results:
            self.window = self._thread.results.popleft()
            report = self._report_to
            if report is not None:
                try:
                    tell(report, self.window)
                except Exception as error:  # of the user's function: the job goes on without it
                    self._report_to = None
                    _warn(f"report={report!r} has failed and is not called again: {error!r}")

    def _end_early(self) -> None:
        """Say why the watch has ended before the loop, if it has."""
        self._remove_hooks()
        if self._thread.problem and not self._told:
            self._told = True
            _warn(f"watches no longer: {self._thread.problem}")

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def _earliest_to_trace(self) -> int:
        """Return the first step that all ranks can trace: each reads the mark at the end of its next window."""
        return self.current_step + self._options.every + self._options.every // 2 + _WARM_UP_STEPS


@final
class _Windows:
    """The moments of the current window.

    Args:
        recorder: Records work and waits.
        unseen: Which late ranks the moments may not show; empty if they show all.
        has_others: There are other ranks.
    """

    def __init__(self, recorder: WorkRecorder[Any], unseen: str, *, has_others: bool) -> None:
        self._recorder = recorder
        self._unseen = unseen
        self._has_others = has_others
        self._steps: list[StepMoments[Any]] = []
        self._n_windows = 0

    def end_step(self, step: int) -> None:
        """End a step."""
        moments = self._recorder.end_step(step)
        if moments is not None:
            self._steps.append(moments)

    def end(self, *, is_last: bool = False) -> WindowMoments[Any]:
        """Return the steps since the last window."""
        is_blind = self._recorder.n_waits == 0 and self._has_others
        if self._n_windows == 0 and is_blind and self._steps:
            _warn(
                f"{_NO_WAITS}: pass the DistributedDataParallel or fully_shard model to real.watch, or exchange "
                "gradients within `with watch.waiting():`"
            )
        window = WindowMoments(self._n_windows, self._steps, is_last, _NO_WAITS if is_blind else self._unseen)
        self._steps = []
        self._n_windows += 1
        return window


def _place() -> tuple[int, int]:
    """Return the number of this rank, and of all ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RunError(
            f"real.watch: there are {os.environ['WORLD_SIZE']} ranks and no process group; call "
            f"torch.distributed.init_process_group before it"
        )
    return 0, 1


def _print(window: LatenessWindow) -> None:
    print(window, flush=True)  # noqa: T201


def _warn(text: str) -> None:
    """Warn. A filter that turns warnings into errors must not end the job."""
    try:
        warnings.warn(f"real.watch: {text}", RuntimeWarning, stacklevel=5)
    except RuntimeWarning:
        print(f"real.watch: {text}", file=sys.stderr)  # noqa: T201


def _clock(device: torch.device | None) -> StepClock[Any]:
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device is not None and device.type == "cuda":
        return CudaStepClock(device)
    return HostStepClock()
