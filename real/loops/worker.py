"""The worker of a loop: its methods are called between steps, and at the end."""

import atexit
import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from real.execution.executor import Executor
from real.loops.bound_model import BoundModel
from real.loops.conclusion import Conclusion
from real.loops.feeding import LoopBatches, open_batches
from real.loops.hooks import Hooks
from real.loops.options import Averaging
from real.loops.planning import ENDLESS_STEPS
from real.loops.ranks import Peers, last_of, patient_group, wait
from real.loops.resuming import Resuming
from real.loops.tracing import Measuring
from real.processes.launch import Connection
from real.session import Session
from simdist.errors import RunError, UnsupportedError
from simdist.plan.ops import entering

_LAST_COLLECTIVE_S = 5.0  # for one that fails because another rank has


@final
class Worker(nn.Module):
    """One rank of a training loop that follows a plan. `wrap` makes it.

    Calling it calls the model. Like `DistributedDataParallel`, it has `module`, `no_sync`, `join` and
    `require_backward_grad_sync`, so it can replace the DDP model in a script.

    Attributes:
        module: The model that was wrapped.
        plan: The plan that the loop performs.
        watch: Reports late ranks. None without `Experiment(watching=...)`.
    """

    def __init__(
        self,
        session: Session,
        model: BoundModel,
        executor: Executor,
        resuming: Resuming,
        averaging: Averaging,
        measuring: Measuring,
        peers: Peers,
        until_closed: ExitStack,
    ) -> None:
        super().__init__()
        self.module = model.module
        self.plan = session.plan
        self.watch = measuring.watch
        self._session = session
        self._tracing = measuring.tracing
        self._until_closed = until_closed
        self._is_sharded = model.shards is not None
        self._iterating = False
        self._closed = False
        self._join_group: dist.ProcessGroup | None = None
        self._hooks = Hooks(session, model, executor, first_step=resuming.first_step, after_step=self._after_step)
        self._conclusion = Conclusion(session, model, self._hooks, resuming, averaging, peers)
        until_closed.callback(self._hooks.release)
        atexit.register(self._part_unclosed)

    def forward(self, *inputs: object, **options: object) -> object:
        """Call the model."""
        if self.module.training and torch.is_grad_enabled():
            self._check_open("a pass in training mode")
        return self.module(*inputs, **options)

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        """Copy the bare model, as `AveragedModel` does."""
        return copy.deepcopy(self.module, memo)

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._connection.place.world_size

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._connection.device

    @property
    def n_steps(self) -> int | None:
        """Steps in all. None if the end is not known."""
        return None if self.plan.n_steps == ENDLESS_STEPS else self.plan.n_steps

    @property
    def step(self) -> int:
        """The current step, or the next one between two steps."""
        return self._hooks.position.step

    @property
    def _connection(self) -> Connection:
        return self._session.connection

    @property
    def _executor(self) -> Executor:
        return self._hooks.position.executor

    def feed(self, url: str, *, cache: Path | str | None = None, timeout_s: float = 60.0) -> LoopBatches:
        """Read the plan's data set for this rank, from the next step on. All ranks call this.

            batches = worker.feed("/mnt/imagenet", cache="/nvme/cache")
            for step, (images, labels) in zip(worker.steps(), batches):
                ...

        Args:
            url: Location of the folder with `index.csv`. It must be the data set of the plan.
            cache: Folder on this node's disk for files. It is kept. The default is a temporary folder.
            timeout_s: Limit for reading a file, and for each wait for other ranks.

        Returns:
            An iterator over batches, uint8 `[batch_size, *sample shape]` and int64 labels, on the device of the model.

        Raises:
            ScenarioError: The plan has no data set, or is for another one.
            RunError: The data set cannot be reached, or a rank is missing.
            UnsupportedError: The model is under `fully_shard`.
        """
        if self._is_sharded:
            raise UnsupportedError(
                "worker.feed() of a model under fully_shard: its plan deals no samples to ranks; read the data set in "
                "the loop"
            )
        folder = None if cache is None else Path(cache)
        with self._calling("worker.feed()"):
            opened = open_batches(
                self.plan, self._connection, first_step=self.step, url=url, cache=folder, timeout_s=timeout_s
            )
        self._conclusion.reads = True
        return self._until_closed.enter_context(opened)

    def steps(self) -> Iterator[int]:
        """Yield every remaining step, except those that this rank sits out.

        Checkpoints are written when the loop asks for the next step.

        A loop over epochs calls this in each epoch. A step that was yielded but not begun is yielded again.

        Raises:
            RunError: The loop asks for the next step before it has done this one; or see `wrap`.
        """
        self._check_open("worker.steps()")
        self._iterating = True
        self._hooks.updates.settle()
        self._conclusion.conclude()
        self._conclusion.resuming.rewind_random()
        while self.step < self.plan.n_steps:
            if self._hooks.position.pass_over_step():
                self._conclusion.conclude()
                continue
            step = self.step
            yield step
            self._hooks.updates.settle()
            if self.step != step + 1:
                raise RunError(
                    f"step {step}: the loop asks for the next one {self._hooks.position.at.value}; a step is one "
                    f"forward pass in training mode, one loss.backward() and one optimizer.step(); in another "
                    f"epoch, call worker.steps() again; to leave a batch out, call worker.skip()"
                )
            self._conclusion.conclude()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next pass belongs to the plan. Other passes only add up gradients, as in `no_sync`."""
        return not self._hooks.passes.accumulate

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._hooks.passes.accumulate = not value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: passes in this context only add them up on this rank, as in DDP's `no_sync`.

            for step, micro_batches in zip(worker.steps(), batches):
                optimizer.zero_grad()
                for inputs, targets in micro_batches[:-1]:
                    with worker.no_sync():
                        loss_of(model(inputs), targets).backward()
                loss_of(model(micro_batches[-1].inputs), micro_batches[-1].targets).backward()
                optimizer.step()

        The next pass belongs to the plan and exchanges the sum. Put both passes of a micro-batch inside.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def skip(self, update: Callable[[], object] | None = None) -> None:
        """Do a step without this rank's batch, also after its forward pass.

            if not torch.isfinite(loss):
                worker.skip()
                continue

        The rank takes part in the step without a gradient, and means are still over all ranks, as in `join`. So one
        rank may leave out a batch, or several, or all. The optimizer does its step. If no rank has a gradient, that
        changes nothing. After `loss.backward()`, gradients have been exchanged, and this rank leaves out its update.

        Args:
            update: Does the optimizer's step if another rank has gradients. The default is `optimizer.step`. With a
                gradient scaler, it is a function that calls `scaler.step(optimizer)`, which unscales these gradients,
                and `scaler.update()`.

        Raises:
            RunError: The loop is in a pass, the plan has no further step, or a rank is missing.
        """
        self._check_open("worker.skip()")
        with self._calling("worker.skip()"):
            self._hooks.updates.skip(update)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Train on different numbers of batches per rank, as in DDP's `join`. All ranks enter this context.

            with worker.join():
                for inputs, targets in loader:
                    ...

        A rank that is done takes part in the steps of the others without a gradient. Means are still over all ranks.
        At the end, all ranks have the parameters, buffers and optimizer's state of a rank that trained longest. Each
        step costs one additional exchange.
        """
        self._check_open("worker.join()")
        self._hooks.guards.check_unshared("worker.join()")
        self._hooks.guards.check_alone("worker.join()")
        if any(map(entering, self.plan.bodies)):
            raise RunError(f"worker.join(): ranks of {self.plan.name} sit steps out; give all of them enough data")
        if self._join_group is None:
            self._join_group = patient_group(self._connection)
        group = self._join_group
        last = 0
        active = True

        def meet() -> bool:
            nonlocal last
            with self._calling("worker.join()"):
                found = wait(self._connection, lambda: last_of(active, group), "a step of joined ranks")
            last = last if found is None else found
            return found is not None

        with self._hooks.position.joined(meet):
            yield
        self._hooks.updates.settle()
        self._conclusion.conclude()
        active = False
        while meet():
            self._hooks.updates.idle_step()
            self._conclusion.conclude()
        self._executor.drain()
        wait(self._connection, lambda: self._conclusion.resuming.take_over(last, group), "the end of joined ranks")

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients as `torch.nn.utils.clip_grad_norm_` does, also where ranks share updates.

        With shared updates, each rank has a slice of the mean gradients. All ranks call this before `optimizer.step()`.

        Args:
            max_norm: Largest norm of all gradients together.

        Returns:
            The norm before clipping, a scalar.

        Raises:
            RunError: The backward pass is not over, or a rank is missing.
        """
        with self._calling("worker.clip_grad_norm_()"):
            return self._hooks.updates.clip_grad_norm(max_norm, self._connection.group)

    def average(self, *, buffers: bool = False) -> None:
        """Replace the parameters by their means over all ranks, such as for an evaluation.

        All ranks call this before the same pass. Training continues from the means: under local SGD, this is one
        average in addition to those of the schedule.

        Args:
            buffers: Also average floating-point buffers.

        Raises:
            RunError: The loop is in a pass or an update, or is closed; or a rank is missing.
        """
        self._check_open("worker.average()")
        self._hooks.check_between_steps("worker.average()")
        with self._calling("worker.average()"):
            self._executor.drain()
            self._conclusion.average(buffers=buffers)
            self._conclusion.warn_of_left_out()

    def close(self) -> None:
        """Complete the operations of the plan, write the trace, and disconnect from the other ranks.

        Raises:
            RunError: The ranks have not done the same steps, or a rank has failed.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._part_unclosed)
        try:
            if error is not None:
                self._until_closed.__exit__(kind, error, traceback)
                return
            with self._until_closed, self._calling("worker.close()", self._hint_at_skip):
                self._hooks.updates.settle()
                self._executor.drain()
                self._conclusion.conclude(at_end=True)
                if self._tracing:
                    self._tracing.finish()
        finally:
            self._executor.join(_LAST_COLLECTIVE_S)

    def _calling(self, name: str, hint: str = "") -> AbstractContextManager[None]:
        """Announce to the other ranks a call that all of them make before the same step."""
        return self._connection.guard.calling(f"called {name} before step {self.step}{hint}")

    @property
    def _hint_at_skip(self) -> str:
        is_early = self.n_steps is None or self.step < self.n_steps
        return " (a rank that leaves out a batch calls worker.skip())" if is_early else ""

    def _part_unclosed(self) -> None:
        """Disconnect when a script ends without closing its loop. Rank 0 warns that the end of the loop was skipped."""
        if error := vars(sys).get("last_value"):
            self._connection.guard.fail(str(error) or type(error).__name__)
        elif self.rank == 0 and not self._conclusion.is_ended:
            warnings.warn(
                f"{self.plan.name}: the loop was not closed, so nothing was averaged or saved at its end: call "
                f"worker.close() on all ranks, before the model is saved and the process group is destroyed",
                RuntimeWarning,
                stacklevel=1,
            )
        self._connection.guard.leave()
        self._executor.close()
        self._executor.join(_LAST_COLLECTIVE_S)

    def _check_open(self, doing: str) -> None:
        """Raise an error after the loop was closed, when ranks no longer synchronise."""
        if self._closed:
            raise RunError(f"{doing} after the loop was closed; do that before, or call real.wrap again")

    def _after_step(self) -> None:
        if self.watch is not None:
            self.watch.step()
        if not self._iterating:
            self._conclusion.resuming.check_also()
            self._conclusion.conclude()
