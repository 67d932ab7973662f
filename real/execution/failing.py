"""Failures of a run, injected into one rank at the start of its steps.

A failure strikes where the rank begins the forward pass of a step. Before, the rank awaits the files for which the plan
blocks, so the newest checkpoint is the same in every run.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias, final

from real.programs.base import Computation, Program
from real.recording.timing import now_s, sleep_s
from simdist.errors import RunError
from simdist.plan import ops
from simdist.plan.failures import StepFailure

# Takes a failure of kind `lost` or `pause` that is due on this rank, and lets its node or its link fail.
FailNode: TypeAlias = Callable[[StepFailure], None]

_POLL_S = 0.1


@final
class FailingProgram(Program):
    """A program whose rank fails.

    Args:
        program: What the rank performs.
        due: The failures that are to strike this rank in this attempt, each with its number in the run.
        failed: Set when the run has failed.
        note: Takes number and step of a failure just before it strikes. What it writes outlives the process.
        await_saved: Waits until the checkpoint before a step is written, if ranks block for it, or if told so.
        most_hang_s: A hang that nobody has found after so many seconds ends in an error.
        saving: The operations that write a checkpoint; none if the plan has none.
        begins: Called with each step that the rank begins, before it may fail.
        fail_node: Lets nodes and links fail. Without it, the rank of a lost node ends, and a link's rank pauses.
    """

    def __init__(  # noqa: PLR0913 (what may fail, and how)
        self,
        program: Program,
        due: Sequence[tuple[int, StepFailure]],
        failed: threading.Event,
        *,
        note: Callable[[int, int], None],
        await_saved: Callable[[int, bool], None],
        most_hang_s: float,
        saving: Sequence[ops.Copy | ops.Save],
        begins: Callable[[int], None] | None = None,
        fail_node: FailNode | None = None,
    ) -> None:
        self._program = program
        self._due = list(due)
        self._failed = failed
        self._note = note
        self._await_saved = await_saved
        self._most_hang_s = most_hang_s
        self._saving = saving
        self._begins = begins
        self._step = -1
        self._fail_node = fail_node
        self._slower_s = 0.0

    def load(self, op: ops.Load, number: int) -> None:
        """Let the program load."""
        self._program.load(op, number)

    def perform(self, op: Computation, step: int) -> None:
        """Let the program perform an operation."""
        self._program.perform(op, step)

    def forward(self, parts: Sequence[ops.Forward], step: int, complete: Callable[[], object]) -> None:
        """Fail if it is time to, then let the program compute."""
        if self._begins is not None and step != self._step:
            self._begins(step)
        self._step = step
        while self._due and self._due[0][1].step <= step:
            number, failure = self._due.pop(0)
            self._strike(number, failure, step)
        sleep_s(self._slower_s, self._failed)
        self._program.forward(parts, step, complete)

    def backward(self, buckets: Sequence[ops.Backward], complete: Callable[[], object]) -> None:
        """Let the program compute."""
        self._program.backward(buckets, complete)

    def _strike(self, number: int, failure: StepFailure, step: int) -> None:
        if failure.kind == "planned" and step and failure.ends_attempt:
            for op in self._saving:
                self._program.perform(op, step - 1)
        if failure.ends_attempt:
            self._await_saved(step, failure.kind == "planned")
        self._note(number, step)
        if failure.kind in ("lost", "pause") and self._fail_node is not None:
            self._fail_node(failure)
            return
        match failure.kind:
            case "gone" | "lost" | "planned":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                self._hang(step)
            case "pause":
                sleep_s(failure.pause_s, self._failed)
            case "slow":
                self._slower_s += failure.pause_s

    def _hang(self, step: int) -> NoReturn:
        """Take no part until the others have found that, or torchrun ends this process."""
        until_s = now_s() + self._most_hang_s
        while now_s() < until_s:
            if self._failed.wait(_POLL_S):
                raise RunError(f"this rank hung at the start of step {step}, as failures.json says")
        raise RunError(
            f"this rank hung at the start of step {step}, and no rank has found that in {self._most_hang_s:g} s"
        )
