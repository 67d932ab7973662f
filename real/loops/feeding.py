"""Batches for a user's own training loop, read ahead from the plan's data set."""

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from real.data.inputs import DataOptions, InputReader, n_ahead, open_input
from real.data.tallies import Tally, totals
from real.processes.launch import Connection
from simdist.errors import RunError, ScenarioError
from simdist.plan import Plan, StageIn

_LOOK_S = 0.1  # between two checks whether the run has failed


def open_batches(
    plan: Plan, connection: Connection, *, first_step: int, url: str, cache: Path | None, timeout_s: float
) -> "LoopBatches":
    """Open the data set of a plan for a training loop. All ranks take part.

    Args:
        plan: The plan that the loop follows.
        connection: To the other ranks.
        first_step: First step of the loop.
        url: Location of the data set.
        cache: Folder on the node's disk. Its files are kept.
        timeout_s: Limit for reading a file, and for each wait for other ranks.

    Raises:
        ScenarioError: The plan has no data set, the plan is for another data set, or a step has no batch.
        RunError: The data set cannot be reached.
    """
    if plan.dataset is None:
        raise ScenarioError(f"plan {plan.name} has no data set: give the scenario of the run directory `data`")
    n_loads = sum(1 for _ in plan.loads())
    if n_loads != plan.n_steps:
        raise ScenarioError(
            f"plan {plan.name} loads {n_loads} batches in {plan.n_steps} steps; a loop takes one a step"
        )
    stop = threading.Event()
    tally = Tally(n_loads)
    options = DataOptions(url, cache, cold=False, timeout_s=timeout_s)
    with ExitStack() as stack:
        source = stack.enter_context(
            open_input(plan, options, rank=connection.place.rank, others=connection, failed=stop, tally=tally)
        )
        return LoopBatches(plan, source, connection, first_step=first_step, stop=stop, opened=stack.pop_all())


@final
class LoopBatches(AbstractContextManager["LoopBatches"]):
    """Yields this rank's batch of each remaining step. `Worker.feed` makes it.

    A batch is uint8 `[batch_size, *sample shape]` and int64 labels, on the device of the model. On a CPU, it is valid
    until the next one.
    """

    def __init__(
        self,
        plan: Plan,
        source: InputReader,
        connection: Connection,
        *,
        first_step: int,
        stop: threading.Event,
        opened: ExitStack,
    ) -> None:
        self._source = source
        self._device = connection.device
        self._guard = connection.guard
        self._stop = stop
        self._opened = opened
        self._numbers = iter(range(first_step, plan.n_steps))
        self._stages = any(isinstance(op, StageIn) for body in plan.bodies for op in body)
        self._empty: queue.SimpleQueue[tuple[Tensor, Tensor]] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[Tensor, Tensor] | Exception | None] = queue.SimpleQueue()
        for _ in range(n_ahead(plan) + 1):  # one is with the loop
            self._empty.put(_buffers(source, pinned=self._device.type == "cuda"))
        self._lent: tuple[Tensor, Tensor] | None = None
        self._thread = threading.Thread(target=self._read, name="feed", daemon=True)
        self._thread.start()

    @property
    def reads(self) -> Mapping[str, int]:
        """Numbers of samples and bytes that this rank has read from each level of storage."""
        return totals(self._source.tally.rows[None])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the next batch.

        Raises:
            RunError: A sample cannot be read, and the error names it; or another rank has failed.
        """
        self._give_back()
        match self._next():
            case None:
                self._full.put(None)
                raise StopIteration
            case Exception() as error:
                self._full.put(error)
                raise error
            case inputs, labels:
                self._lent = inputs, labels
                return inputs.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        self._thread.join()
        self._opened.close()

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _next(self) -> tuple[Tensor, Tensor] | Exception | None:
        while True:
            try:
                return self._full.get(timeout=_LOOK_S)
            except queue.Empty:
                self._guard.check()
                if self._stop.is_set():
                    raise RunError("the data set was closed") from None

    def _give_back(self) -> None:
        """Free the buffers of the last batch for the next one, once a copy to a GPU has ended."""
        if self._lent is not None:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self._empty.put(self._lent)
            self._lent = None

    def _read(self) -> None:
        try:
            if self._stages:
                self._source.stage_in()
            for number in self._numbers:
                buffers = self._free_buffers()
                if buffers is None:
                    return
                self._source.fill(number, *buffers)
                self._full.put(buffers)
            self._full.put(None)
        except Exception as error:  # raised where the loop asks for a batch
            self._full.put(error)

    def _free_buffers(self) -> tuple[Tensor, Tensor] | None:
        while not self._stop.is_set():
            try:
                return self._empty.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
        return None


def _buffers(source: InputReader, *, pinned: bool) -> tuple[Tensor, Tensor]:
    n = source.dataset.batch_size
    inputs = torch.empty((n, *source.sources.shape), dtype=torch.uint8, pin_memory=pinned)
    return inputs, torch.empty(n, dtype=torch.int64, pin_memory=pinned)
