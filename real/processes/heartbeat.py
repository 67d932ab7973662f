"""Heartbeats: detect which rank has failed, and report it instead of hanging.

A collective that never ends looks the same on all ranks, whichever rank is the cause. So each rank sends heartbeats:
twice a second, a thread writes the progress and state of its rank into the store, and reads those of the others. From
this table a rank learns, within seconds and without any collective, that another one has

* ended without a message: its process is gone from this machine (killed, out of memory, a crash in native code);
* failed: it reported its error before it ended;
* fallen silent: many of our own beats went through and none of its (its machine is gone or frozen).

Silence is counted in own beats and not in seconds, because a slow store or a loaded machine slows both sides equally.
Silence ends the others only after the timeout, because a rank that unpickles a data set also delays its own beats. If
an exchange has failed, a few seconds of silence are enough to identify the rank. A rank passes on the first cause that
it learns. So all ranks name the rank that failed first, not one that failed as a consequence. Only the thread talks to
the store, so a hung store cannot block its rank.

A store ends with the rank that hosts it. So that rank leaves last: when every other rank has left, or has completed as
many exchanges and read the table since.
"""

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

from real.processes.signing import SignedStore
from simdist.errors import RunError

BEAT_S = 0.5
SILENT_BEATS = 12
SETTLE_S = 3.0  # time for the report of another process's failure to arrive: two beats there, two here, and a reserve
LAST_WORDS_S = 2.0  # for the last message of a rank that fails


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The message that a rank sends to the others twice a second.

    Args:
        rank: the sender.
        count: number of beats so far; it grows while the rank lives.
        position: progress of the rank (an instance index of the plan).
        host: name of its machine, for messages.
        machine: identity of its machine and process namespace; if it is equal, a pid means the same process.
        pid: process id.
        state: `failed` and `done` are final.
        cause: the sentence that names the rank that failed first, once it is known.
        step: number of steps of its training loop that the rank has begun; None without a loop.
        n_exchanges: number of exchanges through the store that the rank has completed.
        call: the call under way that all ranks make together, as the end of a sentence; empty without one.
    """

    rank: int
    count: int
    position: int
    host: str
    machine: str
    pid: int
    state: Literal["alive", "failed", "done"]
    cause: str
    step: int | None = None
    n_exchanges: int = 0
    call: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


def named(ranks: Sequence[int]) -> str:
    """Name ranks: `rank 3`, `ranks 3, 4`."""
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def ranks_have(ranks: Sequence[int]) -> str:
    """Begin a sentence about ranks: `rank 3 has`, `ranks 3, 4 have`."""
    return f"{named(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def name_calls(calls: Mapping[int, str], steps: Mapping[int, int | None]) -> str:
    """Name the calls of ranks that have to make the same one; return an empty text if they do.

    Args:
        calls: The call of each rank, as the end of a sentence. Empty without one.
        steps: Number of steps that each rank has begun.

    >>> name_calls({0: "called worker.average() before step 0", 1: "", 2: ""}, {0: 0, 1: 4, 2: 4})
    'rank 0 called worker.average() before step 0, ranks 1, 2 did not (at step 3)'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items(), key=lambda each: (not each[1], each[0])):
        ranks_of.setdefault(call, []).append(rank)
    if len(ranks_of) == 1:
        return ""
    parts = [f"{named(ranks)} {call}" for call, ranks in ranks_of.items() if call]
    if idle := ranks_of.get(""):
        reached = [max(0, (steps.get(rank) or 0) - 1) for rank in idle]
        at = f"step {min(reached)}" if len(set(reached)) == 1 else f"steps {min(reached)} to {max(reached)}"
        parts.append(f"{named(idle)} did not (at {at})")
    return ", ".join(parts)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie that its parent has not yet collected does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True  # not Linux, or just gone: the next beat will show it
    return state not in {"Z", "X"}


def boot_id() -> str:
    """Return an identity of the kernel, equal for processes with one clock; empty if unknown."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def machine() -> str:
    """Return an identity that is equal for processes that see each other's pids; containers may share a host name."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


class Guard:
    """Watches the other ranks, and reports this rank to them.

    Args:
        store: a store that each rank reaches, used only by the guard. Unsigned contents are ignored.
        rank: this rank.
        world_size: number of ranks.
        store_at: address and port of the store, for the message when it is gone.
        store_rank: the rank that hosts the store; None if torchrun's agent does.
        exit_with_parent: end this process when its parent is gone, so that no orphan stays behind.

    Attributes:
        position: progress of this rank (an instance index of the plan).
        step: number of steps of its training loop that this rank has begun; None without a loop.
        n_exchanges: number of exchanges through the store that this rank has completed.
        call: the call under way that all ranks make together; see `calling`.
        failed: set when this or another rank has failed.
    """

    def __init__(
        self,
        store: SignedStore,
        rank: int,
        world_size: int,
        *,
        store_at: str,
        store_rank: int | None = 0,
        exit_with_parent: bool = False,
    ) -> None:
        self.position = 0
        self.step: int | None = None
        self.n_exchanges = 0
        self.call = ""
        self.failed = threading.Event()
        self._store = store
        self._keys = [f"beat/{other}" for other in range(world_size)]
        self._store_at = store_at
        self._store_rank = store_rank
        self._parent = os.getppid() if exit_with_parent else None
        self._me = Heartbeat(rank, 0, 0, socket.gethostname(), machine(), os.getpid(), "alive", "")
        self._table: dict[int, Heartbeat] = {}
        self._missing = list(range(world_size))
        self._unset = list(range(world_size))
        self._quiet = dict.fromkeys(range(world_size), 0)  # own beats since the last beat of each rank
        self._cause = ""
        self._own_failure = ""
        self._leaving = False
        self._said: Literal["alive", "failed", "done"] = "alive"
        self._lock = threading.Lock()
        self._called = threading.Event()  # all have answered the roll call
        self._over = threading.Event()
        self._wake = threading.Event()
        self._beaten = threading.Condition()
        self._n_beats = 0
        self._timeout_s = 0.0
        self._patient_beats = SILENT_BEATS
        self._seeks_cause = False  # something has failed
        self._looked = 0, 0  # number of beats at the last look, and looks since
        self._last_beat_s = time.monotonic()
        self._last_count_s = self._last_beat_s
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Call the roll, then watch.

        Raises:
            RunError: a rank did not answer within `timeout_s`. The error names the missing ranks.
        """
        self._timeout_s = timeout_s
        self._patient_beats = max(SILENT_BEATS, math.ceil(timeout_s / BEAT_S))
        self._thread.start()
        deadline_s = time.monotonic() + timeout_s
        while not self._called.wait(0.05):
            self.check()
            if time.monotonic() > deadline_s:
                raise RunError(self._absent(timeout_s))

    def check(self) -> None:
        """Raise RunError if this or another rank has failed."""
        if self.failed.is_set():
            raise RunError(self._cause)

    @property
    def cause(self) -> str:
        """The sentence that names the rank that failed first; empty while none is known."""
        return self._cause

    def find_stuck_store(self, look_s: float) -> None:
        """Declare the host of the store failed if no beat has gone through for as long as a rank may be silent.

        Args:
            look_s: Interval between calls. Calls are counted, like beats: a process that was frozen has missed both.
        """
        self._looked = (self._n_beats, self._looked[1] + 1 if self._looked[0] == self._n_beats else 0)
        patience_s = self._patient_beats * BEAT_S
        if self._thread.is_alive() and self._looked[1] * look_s > patience_s:
            self._blame(f"{self.store_host()} has not answered for {patience_s:g} s")

    def learns_of_failure(self) -> bool:
        """Wait a few seconds for a report of a failure; return whether there was one."""
        self._await_news()
        return self.failed.is_set()

    def stuck_store(self) -> str:
        """Return a sentence if no beat has gone through for a few seconds; else an empty one."""
        is_stuck = self._thread.is_alive() and time.monotonic() - self._last_beat_s > SETTLE_S
        return f"{self.store_host()} has not answered for {SETTLE_S:g} s" if is_stuck else ""

    def fail(self, reason: str) -> None:
        """Report to the others that this rank ends, and why, unless another rank is known to have failed before it."""
        self._own_failure = f"{self._me} failed: {reason}"
        self._await_beat(LAST_WORDS_S)
        self._blame(self._own_failure)

    def explain(self, error: BaseException | None, doing: str) -> RunError:
        """Find the rank that caused an error, waiting a few seconds for its report.

        Args:
            error: exception of a collective; None if a wait timed out.
            doing: activity of this rank, as the beginning of the sentence.

        Returns:
            An error that names the ranks that are dead or have not arrived, or else repeats `error`.
        """
        if self.learns_of_failure():
            return RunError(f"{doing}: {self._cause}")
        if self._store_has_left():
            return RunError(f"{doing}: {self.store_host()} has left, after it waited for this rank")
        if stuck := self.stuck_store():
            return RunError(f"{doing}: {stuck}")
        if late := self._late():
            return RunError(f"{doing}: {late}; look there for what it waits for, or raise the timeout if it is slow")
        reason = f"{type(error).__name__}: {error}" if error else "timed out"
        return RunError(f"{doing}: {reason} (every rank lives, all at operation {self.position})")

    @contextmanager
    def explaining(self, doing: str) -> Iterator[None]:
        """Find the rank that caused an error if torch reports that communication has failed."""
        try:
            yield
        except RunError:
            raise
        except RuntimeError as error:  # includes DistError of torch
            raise self.explain(error, doing) from error

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Announce a call that all ranks make together, so that errors name the ranks that do not.

        The outermost call counts. After an error, the others still see it.

        Args:
            call: The end of a sentence, such as `called worker.average() before step 4`.
        """
        outer = self.call
        self.call = outer or call
        yield
        self.call = outer

    def leave(self) -> None:
        """Send the final message and stop watching. The host of the store waits for the others, up to the timeout."""
        self._leaving = True
        if self._said == "alive" and not self._has_failed():
            self._await_beat(self._timeout_s)
        elif self._said == "alive" and time.monotonic() - self._last_beat_s < LAST_WORDS_S:
            self._await_beat(LAST_WORDS_S)
        if self._store_rank == self._me.rank:
            self._outlast_others()
        self._over.set()
        self._wake.set()
        self._thread.join(LAST_WORDS_S)

    def _outlast_others(self) -> None:
        """Keep the store until no rank needs it any more, or the timeout is over. Then say who is missing."""
        counts = {rank: beat.count for rank, beat in self._table.items()}
        ends_well = not self._has_failed()
        deadline_s = time.monotonic() + self._timeout_s
        missing = self._need_store(counts)
        while missing and self._thread.is_alive() and time.monotonic() < deadline_s:
            self._await_beat(0.1)
            time.sleep(0.01)
            missing = self._need_store(counts)
        if ends_well and (missing or self._cause):
            late = f"{ranks_have([beat.rank for beat in missing])} not answered at the end for {self._timeout_s:g} s"
            print(f"{self._me}, which hosts the store, leaves: {self._cause or late}", file=sys.stderr, flush=True)  # noqa: T201

    def store_host(self) -> str:
        """Describe the host and address of the store."""
        rank = self._store_rank
        who = "torchrun" if rank is None else str(self._table.get(rank, f"rank {rank}"))
        return f"{who}, which hosts the store at {self._store_at},"

    @contextmanager
    def ending_on_sigterm(self) -> Iterator[None]:
        """Raise RunError in the main thread on SIGTERM, with which torchrun ends all ranks once one has failed.

        A second SIGTERM ends the process at once. Native code that blocks the main thread delays the error.
        """

        def end(_signum: int, _frame: FrameType | None) -> NoReturn:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            raise self.explain(RunError("no other rank is known to have failed"), f"{self._me} was ended by SIGTERM")

        before = signal.signal(signal.SIGTERM, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _run(self) -> None:
        while not self._over.is_set() and not self._finished():
            try:
                self._beat()
            except RuntimeError as error:  # includes DistError of torch
                if not (self._leaving or self._store_has_left()):
                    self._blame(f"{self.store_host()} is gone ({str(error).splitlines()[0]})")
                return
            self._end_with_parent()
            self._wake.wait(BEAT_S if self._called.is_set() and not self._leaving else 0.05)
            self._wake.clear()

    def _finished(self) -> bool:
        """Return whether this rank has sent its final message. The host of the store waits for those of the others."""
        return self._store_rank != self._me.rank and self._said != "alive"

    def _store_has_left(self) -> bool:
        """Return whether the host of the store has said that it leaves, so the store may be gone at any time."""
        host = None if self._store_rank is None else self._table.get(self._store_rank)
        return host is not None and host.state != "alive"

    def _beat(self) -> None:
        """Look at the others first, so that this rank's final message names the first cause."""
        gone = [beat for beat in self._table.values() if self._is_gone(beat)]
        self._read()
        self._judge({beat.rank for beat in gone})
        if self._own_failure:
            self._blame(self._own_failure)
        words = self._words()
        self._store.set(self._keys[self._me.rank], json.dumps(asdict(words)))
        with self._beaten:
            self._n_beats += 1
            self._said = words.state
            self._last_beat_s = time.monotonic()
            self._beaten.notify_all()

    def _words(self) -> Heartbeat:
        failed = self._own_failure or (self._leaving and self._cause)
        state: Literal["alive", "failed", "done"] = "failed" if failed else "done" if self._leaving else "alive"
        return replace(
            self._me,
            count=self._n_beats + 1,
            position=self.position,
            state=state,
            cause=self._cause,
            step=self.step,
            n_exchanges=self.n_exchanges,
            call=self.call,
        )

    def _read(self) -> None:
        self._unset = [rank for rank in self._unset if not self._store.check(self._keys[rank])]
        present = sorted(set(range(len(self._keys))).difference(self._unset))
        texts = self._store.multi_get([self._keys[rank] for rank in present])
        now_s = time.monotonic()
        counts = now_s - self._last_count_s > 0.8 * BEAT_S  # extra beats say nothing about the silence of others
        self._last_count_s = now_s if counts else self._last_count_s
        for rank, text in zip(present, texts, strict=True):
            beat = Heartbeat(**json.loads(text)) if text else None
            before = self._table.get(rank)
            if beat and (before is None or before.count < beat.count):  # writing an older one again needs no secret
                self._table[rank] = beat
                self._quiet[rank] = 0
            elif before:
                self._quiet[rank] += counts
        self._missing = [rank for rank in self._missing if rank not in self._table]
        if not self._missing:
            self._called.set()

    def _judge(self, gone: set[int]) -> None:
        """Name the first rank that failed, is gone, or is silent, in this order."""
        others = [beat for beat in self._table.values() if beat.rank != self._me.rank]
        for beat in others:
            if beat.state == "failed":
                self._blame(beat.cause)
        for beat in others:
            if beat.state == "alive" and beat.rank in gone:
                self._blame(f"{beat} ended without a word (killed?)")
        n_silent = SILENT_BEATS if self._seeks_cause else self._patient_beats
        for beat in others:
            if beat.state == "alive" and self._quiet[beat.rank] >= n_silent:
                silent_s = self._quiet[beat.rank] * BEAT_S
                self._blame(f"{beat} has been silent for {silent_s:g} s: its process or machine stands still")

    def _is_gone(self, beat: Heartbeat) -> bool:
        return beat.machine == self._me.machine and not is_alive(beat.pid)

    def _has_failed(self) -> bool:
        return bool(self._own_failure or self._cause)

    def _blame(self, cause: str) -> None:
        with self._lock:
            self._cause = self._cause or cause
            self.failed.set()

    def _end_with_parent(self) -> None:
        if self._parent is None or os.getppid() == self._parent:
            return
        print(f"{self._me}: the process that started it is gone; it ends too", file=sys.stderr, flush=True)  # noqa: T201
        self._blame(f"{self._me} lost the process that started it")
        os.kill(self._me.pid, signal.SIGTERM)
        time.sleep(LAST_WORDS_S + SETTLE_S)
        os._exit(1)  # the main thread is blocked in native code

    def _await_beat(self, timeout_s: float) -> None:
        """Wait for a complete beat that began after this call."""
        with self._beaten:
            wanted = self._n_beats + 2  # one may be running
            deadline_s = time.monotonic() + timeout_s
            while self._n_beats < wanted and self._thread.is_alive() and time.monotonic() < deadline_s:
                self._wake.set()
                self._beaten.wait(0.05)

    def _await_news(self) -> None:
        """Wait until a failure is known, or long enough to be sure that there is none."""
        begin_s = time.monotonic()
        self._seeks_cause = True
        while not self.failed.wait(0.05) and self._thread.is_alive() and not self._store_has_left():
            waited_s = time.monotonic() - begin_s
            doubtful = any(self._quiet[rank] > 3 and beat.state == "alive" for rank, beat in self._table.items())
            if waited_s > SETTLE_S + (SILENT_BEATS * BEAT_S if doubtful else 0.0):
                return

    def _need_store(self, counts: Mapping[int, int]) -> list[Heartbeat]:
        """Return the ranks that have neither ended nor read the table since `counts` and completed our exchanges.

        After a failure no exchange matters, and a rank that has fallen silent is not waited for.
        """
        others = [beat for beat in self._table.values() if beat.rank != self._me.rank and not self._is_gone(beat)]
        alive = [beat for beat in others if beat.state == "alive"]
        if self._has_failed():
            heard = [beat for beat in alive if self._quiet[beat.rank] < SILENT_BEATS]
            return [beat for beat in heard if not _has_read(beat, counts)]
        return [beat for beat in alive if not (_has_read(beat, counts) and beat.n_exchanges >= self.n_exchanges)]

    def compare_calls(self) -> str:
        """Name the calls of the ranks if they differ, or else the steps that they have begun; empty if all agree."""
        beats = self._table | {self._me.rank: self._words()}
        calls = {rank: "has left" if beat.state == "done" else beat.call for rank, beat in beats.items()}
        differences = name_calls(calls, {rank: beat.step for rank, beat in beats.items()})
        return f"{differences}: all ranks do so before the same step" if differences else self._compare_steps()

    def _compare_steps(self) -> str:
        """Name the ranks that have begun fewer steps than the others; empty if none has."""
        steps = {rank: beat.step for rank, beat in self._table.items()} | {self._me.rank: self.step}
        begun = {rank: step for rank, step in steps.items() if step is not None}
        most = max(begun.values(), default=0)
        behind = [f"rank {rank} is at step {step}" for rank, step in sorted(begun.items()) if step < most]
        if not behind:
            return ""
        more = f", {len(behind) - 8} more are behind" if len(behind) > 8 else ""
        return (
            f"{', '.join(behind[:8])}{more}, the others at {most} (a rank that leaves out a batch calls worker.skip())"
        )

    def _late(self) -> str:
        """Name the ranks that are behind the others; empty if none is."""
        if differences := self.compare_calls():
            return differences
        positions = {rank: beat.position for rank, beat in self._table.items()} | {self._me.rank: self.position}
        first = max(positions.values())
        late = [self._table[rank] for rank, position in positions.items() if position < first]
        if not late:
            return ""
        where = ", ".join(f"{beat} is at operation {positions[beat.rank]}" for beat in late[:8])
        more = f" and {len(late) - 8} more" if len(late) > 8 else ""
        return f"{ranks_have([beat.rank for beat in late])} not arrived: {where}{more}, the others at {first}"

    def _absent(self, timeout_s: float) -> str:
        if len(self._missing) == len(self._keys):
            return f"{self.store_host()} has not answered for {timeout_s:g} s"
        return (
            f"{ranks_have(self._missing)} not answered the roll call of {len(self._keys)} ranks within "
            f"{timeout_s:g} s: see the output there, and that all have the same WORLD_SIZE, MASTER_ADDR, MASTER_PORT "
            "and SIMDIST_SECRET"
        )


def _has_read(beat: Heartbeat, counts: Mapping[int, int]) -> bool:
    """Return whether a rank has sent two beats since `counts`: the second began after it, and so read the table."""
    return beat.count >= counts.get(beat.rank, 0) + 2
