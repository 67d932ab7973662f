"""Steps and files of a job that runs for months, at a cost per change and not per step.

Between two changes, steps take the same time, so that the files come at regular intervals:

    interval = max(k step_s, write_s) + stall_s

for a file every k steps. Ranks stand still for `stall_s`; the file is usable `write_s` later, and the next one waits
for it.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

#: What a file survives: the end of processes, the loss of one node, or any loss of nodes.
Survives: TypeAlias = Literal["process", "node", "all"]
_ROUNDING = 1e-9  # of a step


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Files that a job writes.

    Args:
        every_steps: Steps from one file to the next, and before the first.
        stall_s: Time for which training stands still.
        write_s: Time after it until the file is usable.
        load_s: Time to load one.
        keep: Newest files that are kept; all if None.
        survives: `process` for files on the rank's own node, `node` for those in the memory of a neighbour, `all` for
            storage.
    """

    every_steps: int
    stall_s: float = 0.0
    write_s: float = 0.0
    load_s: float = 0.0
    keep: int | None = None
    survives: Survives = "all"


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast training goes from a position on.

    Args:
        step_s: Of a step.
        share: Of the replicas that train.
        cause: Index of the cause that makes steps slower; None if none does.
        factor: By which it does.
    """

    step_s: float
    share: float = 1.0
    cause: int | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """Steps that count, at one pace.

    Args:
        begin: Position in steps where they begin.
        seconds: That all steps before it took.
        samples: Steps before it, each weighed with the share of replicas that trained.
        pace: From there on.
    """

    begin: float
    seconds: float
    samples: float
    pace: Pace

    def at(self, position: float) -> tuple[float, float]:
        """Return seconds and samples up to a position in the stretch."""
        n_steps = position - self.begin
        return self.seconds + n_steps * self.pace.step_s, self.samples + n_steps * self.pace.share


@dataclass(slots=True)
class CheckpointedSteps:
    """Where a job stands.

    Args:
        checkpoints: Its files; None writes none.
        pace: At the begin.
        now_s: Time since the begin of the job.
        done: Steps that are done and count.
        part: Of the step in progress, below 1.
        save_s: Time lost to files so far.
        still_s: Time so far for which nothing passed.
        is_still: Whether nothing passes now.
        n_files: Files written so far.
    """

    checkpoints: Checkpoints | None
    pace: Pace
    now_s: float = 0.0
    done: int = 0
    part: float = 0.0
    save_s: float = 0.0
    still_s: float = 0.0
    is_still: bool = False
    n_files: int = 0
    stretches: list[KeptSteps] = field(default_factory=list)
    _usable: int | None = None
    _pending: int | None = None
    _pending_at_s: float = 0.0
    _is_due: bool = False
    _stall_left_s: float = 0.0

    def __post_init__(self) -> None:
        self.stretches.append(KeptSteps(0.0, 0.0, 0.0, self.pace))

    @property
    def position(self) -> float:
        """Steps, with the part of the one in progress."""
        return self.done + self.part

    @property
    def newest(self) -> int | None:
        """Steps in the newest usable file; None if there is none."""
        if self._pending is not None and self._pending_at_s <= self.now_s:
            return self._pending
        return self._usable

    @property
    def n_usable(self) -> int:
        """Files written so far that are usable."""
        is_open = self._pending is not None and self._pending_at_s > self.now_s
        return self.n_files - 1 if is_open else self.n_files

    def advance(self, until_s: float, until_step: float = math.inf) -> None:
        """Train until a time, or until a number of steps is done and their file, if one is due, is written."""
        while self.now_s < until_s:
            if self.has_done(until_step):
                return
            if self.is_still:
                self.still_s += until_s - self.now_s
                self.now_s = until_s
            elif self._is_due:
                self._save(until_s)
            elif not self._take_intervals(until_s, until_step):
                self._train(until_s, until_step)

    def has_done(self, n_steps: float) -> bool:
        """Tell whether so many steps are done, with their file."""
        return self.done >= n_steps and not self._is_due

    def set_pace(self, pace: Pace, *, lost_samples: float = 0.0) -> None:
        """Go on at another pace; samples since the last average are lost with a replica that leaves."""
        if pace == self.pace and not lost_samples:
            return
        seconds, samples = self.stretches[-1].at(self.position)
        self.stretches.append(KeptSteps(self.position, seconds, samples - lost_samples, pace))
        self.pace = pace

    def go_back(self, n_steps: int) -> float:
        """Go back to so many steps, without files of more steps and without that which is not usable yet.

        Args:
            n_steps: At most those that are done.

        Returns:
            Seconds of the steps that are lost, with the part of the one in progress.
        """
        newest = self.newest
        self.n_files = self.n_usable
        if newest is not None and newest > n_steps:
            assert self.checkpoints is not None
            self.n_files -= math.ceil((newest - n_steps) / self.checkpoints.every_steps)
            newest = n_steps or None
        self._usable = newest
        self._pending = None
        self._is_due = False
        before_s, _ = self.stretches[-1].at(self.position)
        while len(self.stretches) > 1 and self.stretches[-1].begin >= n_steps:
            self.stretches.pop()
        return before_s - self._begin_at(n_steps)

    def forget_files(self) -> None:
        """Lose all files."""
        self._usable = None
        self._pending = None

    def closing_s(self) -> float:
        """Return how long it takes to end the step in progress and to write a usable file; infinite without files."""
        if self.checkpoints is None:
            return math.inf
        end_s = self.now_s + ((1 - self.part) * self.pace.step_s if self.part else 0.0)
        if self._pending is not None:
            end_s = max(end_s, self._pending_at_s)
        stall_s = self._stall_left_s if self._is_due else self.checkpoints.stall_s
        return end_s + stall_s + self.checkpoints.write_s - self.now_s

    def close(self) -> None:
        """End the step in progress, and write a usable file."""
        assert self.checkpoints is not None
        end_s = self.now_s + self.closing_s()
        if self.part:
            self.now_s += (1 - self.part) * self.pace.step_s
            self.done += 1
            self.part = 0.0
        self.save_s += end_s - self.now_s
        self.now_s = end_s
        self._is_due = False
        self._written(end_s)

    def wait_for_file(self) -> None:
        """Wait until the newest file is usable."""
        if self._pending is not None and self._pending_at_s > self.now_s:
            self.save_s += self._pending_at_s - self.now_s
            self.now_s = self._pending_at_s

    def _begin_at(self, n_steps: int) -> float:
        """Go on after so many steps; return the seconds that they took."""
        last = self.stretches[-1]
        seconds, samples = last.at(n_steps)
        self.done = n_steps
        self.part = 0.0
        if last.pace != self.pace:
            self.stretches.append(KeptSteps(float(n_steps), seconds, samples, self.pace))
        return seconds

    def _train(self, until_s: float, until_step: float) -> None:
        """Train until a file is due, or as long as asked for."""
        due: float = math.inf
        if self.checkpoints is not None:
            due = (self.done // self.checkpoints.every_steps + 1) * self.checkpoints.every_steps
        goal = min(due, until_step)
        step_s = self.pace.step_s
        left = goal - self.done - self.part
        if goal < math.inf and self.now_s + left * step_s <= until_s + _ROUNDING * step_s:
            self.now_s = min(self.now_s + left * step_s, until_s)
            self.done = int(goal)
            self.part = 0.0
            if goal == due and self.checkpoints is not None:
                self._is_due = True
                self._stall_left_s = self.checkpoints.stall_s
                if self.now_s == until_s:
                    self._save(until_s)
            return
        part = self.part + (until_s - self.now_s) / step_s
        n_steps = math.floor(part + _ROUNDING)
        self.done += n_steps
        self.part = max(0.0, part - n_steps)
        self.now_s = until_s

    def _take_intervals(self, until_s: float, until_step: float) -> bool:
        """Train for whole intervals between files, if one has just been written and another one fits."""
        files = self.checkpoints
        if files is None or self.part or self._pending != self.done:
            return False
        if self._pending_at_s != self.now_s + files.write_s or self.done % files.every_steps:
            return False
        steps_s = files.every_steps * self.pace.step_s
        interval_s = max(steps_s, files.write_s) + files.stall_s
        n = int(min((until_s - self.now_s) / interval_s, (until_step - self.done) // files.every_steps))
        if n < 1:
            return False
        self.now_s = min(self.now_s + n * interval_s, until_s)
        self.save_s += n * (interval_s - steps_s)
        self.done += n * files.every_steps
        self.n_files += n - 1
        self._pending = self.done - files.every_steps
        self._pending_at_s = self.now_s  # or before
        self._written(self.now_s + files.write_s)
        return True

    def _save(self, until_s: float) -> None:
        """Wait for the file before, and stand still for the one that is due."""
        assert self.checkpoints is not None
        begin_s = self.now_s
        if self._pending is not None:
            begin_s = max(begin_s, self._pending_at_s)
        if begin_s > until_s:
            self.save_s += until_s - self.now_s
            self.now_s = until_s
            return
        spent_s = min(self._stall_left_s, until_s - begin_s)
        self._stall_left_s -= spent_s
        self.save_s += begin_s - self.now_s + spent_s
        self.now_s = begin_s + spent_s
        if self._stall_left_s <= 0:
            self._is_due = False
            self._written(self.now_s + self.checkpoints.write_s)

    def _written(self, usable_at_s: float) -> None:
        """Note a file of the steps that are done."""
        self._usable = self.newest
        self._pending = self.done
        self._pending_at_s = usable_at_s
        self.n_files += 1
