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

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Literal, NoReturn, final

from real.processes.beats import BEAT_S, BeatTable, Heartbeat, compare_calls, machine, name_late, ranks_have
from real.processes.signing import SignedStore
from simdist.errors import RunError

_SILENT_BEATS = 12
_SETTLE_S = 3.0  # time for the report of another process's failure to arrive: two beats there, two here, and a reserve
_LAST_WORDS_S = 2.0  # for the last message of a rank that fails


@final
class _Failure:
    """What is known of the first failure. It is true if a rank has failed.

    Attributes:
        cause: The sentence that names the rank that failed first; empty while none is known.
        own: The failure of this rank; empty without one.
        is_known: Set with the cause.
        is_sought: Something has failed, and the cause is looked for.
    """

    def __init__(self) -> None:
        self.cause = ""
        self.own = ""
        self.is_known = threading.Event()
        self.is_sought = False
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self.own or self.cause)

    def blame(self, cause: str) -> None:
        """Learn of a failure. The first one counts."""
        with self._lock:
            self.cause = self.cause or cause
            self.is_known.set()


@final
class _Pulse:
    """The thread that beats.

    Args:
        beat: Does a beat, and returns the seconds to the next one; None ends the thread.

    Attributes:
        n_beats: Number of complete beats.
        said: The state of this rank in the last beat.
    """

    def __init__(self, beat: Callable[[], float | None]) -> None:
        self.n_beats = 0
        self.said: Literal["alive", "failed", "done"] = "alive"
        self._beat = beat
        self._last_s = time.monotonic()
        self._looked = 0, 0  # number of beats at the last look, and looks since
        self._over = threading.Event()
        self._wake = threading.Event()
        self._beaten = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def since_beat_s(self) -> float:
        """Seconds since the last complete beat."""
        return time.monotonic() - self._last_s

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self, timeout_s: float) -> None:
        """End the thread."""
        self._over.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def note(self, said: Literal["alive", "failed", "done"]) -> None:
        """Note that a beat is complete, and what it said."""
        with self._beaten:
            self.n_beats += 1
            self.said = said
            self._last_s = time.monotonic()
            self._beaten.notify_all()

    def looks_since_beat(self) -> int:
        """Count the calls of this function since the last beat."""
        self._looked = (self.n_beats, self._looked[1] + 1 if self._looked[0] == self.n_beats else 0)
        return self._looked[1]

    def await_beat(self, timeout_s: float) -> None:
        """Wait for a complete beat that began after this call."""
        with self._beaten:
            wanted = self.n_beats + 2  # one may be running
            deadline_s = time.monotonic() + timeout_s
            while self.n_beats < wanted and self._thread.is_alive() and time.monotonic() < deadline_s:
                self._wake.set()
                self._beaten.wait(0.05)

    def _run(self) -> None:
        while not self._over.is_set():
            pause_s = self._beat()
            if pause_s is None:
                return
            self._wake.wait(pause_s)
            self._wake.clear()


@dataclass(slots=True)
class _OwnEnd:
    """Why this rank may have to end although no other has failed.

    Args:
        parent: The process with which this one ends; None if it outlives it.
        left_behind: Returns why the others went on without this rank; empty if they did not.
        known_s: When that was known first, by `time.monotonic`.
    """

    parent: int | None
    left_behind: Callable[[], str] | None
    known_s: float | None = None


@final
class Guard:
    """Watches the other ranks, and reports this rank to them.

    Args:
        store: a store that each rank reaches, used only by the guard. Unsigned contents are ignored.
        rank: this rank.
        world_size: number of ranks.
        store_at: address and port of the store, for the message when it is gone.
        store_rank: the rank that hosts the store; None if torchrun's agent does.
        exit_with_parent: end this process when its parent is gone, so that no orphan stays behind.
        process: number of this process among those that had this rank.
        left_behind: if given, the end of another rank does not end this one. It returns why this rank has to end,
            because the others went on without it; an empty text if it has not.

    Attributes:
        position: progress of this rank (an instance index of the plan).
        step: number of steps of its training loop that this rank has begun; None without a loop.
        n_exchanges: number of exchanges through the store that this rank has completed.
        call: the call under way that all ranks make together; see `calling`.
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
        process: int = 0,
        left_behind: Callable[[], str] | None = None,
    ) -> None:
        self.position = 0
        self.step: int | None = None
        self.n_exchanges = 0
        self.call = ""
        self._me = Heartbeat(rank, 0, 0, socket.gethostname(), machine(), os.getpid(), "alive", "", process=process)
        self._table = BeatTable(store, self._me, world_size)
        self._store_host = store_rank, store_at
        self._failure = _Failure()
        self._leaving = False
        self._own_end = _OwnEnd(os.getppid() if exit_with_parent else None, left_behind)
        self._timeout_s = 0.0
        self._pulse = _Pulse(self._beat_on)

    @property
    def failed(self) -> threading.Event:
        """Set when this or another rank has failed."""
        return self._failure.is_known

    @property
    def cause(self) -> str:
        """The sentence that names the rank that failed first; empty while none is known."""
        return self._failure.cause

    def start(self, timeout_s: float, start_timeout_s: float) -> None:
        """Call the roll, then watch.

        Args:
            timeout_s: limit for later waits, such as for a silent rank.
            start_timeout_s: limit for the roll call.

        Raises:
            RunError: a rank did not answer the roll call in time. The error names the missing ranks.
        """
        self._timeout_s = timeout_s
        self._pulse.start()
        deadline_s = time.monotonic() + start_timeout_s
        while not self._table.is_full.wait(0.05):
            self.check()
            if time.monotonic() > deadline_s:
                raise RunError(self._absent(start_timeout_s))

    def check(self) -> None:
        """Raise RunError if this or another rank has failed."""
        if self.failed.is_set():
            raise RunError(self.cause)

    def find_stuck_store(self, look_s: float) -> None:
        """Declare the host of the store failed if no beat has gone through for as long as a rank may be silent.

        Args:
            look_s: Interval between calls. Calls are counted, like beats: a process that was frozen has missed both.
        """
        patience_s = self._patient_beats * BEAT_S
        if self._pulse.looks_since_beat() * look_s > patience_s and self._pulse.is_alive:
            self._failure.blame(f"{self.store_host()} has not answered for {patience_s:g} s")

    def has_ended(self, rank: int, process: int, *, is_sought: bool = False) -> bool:
        """Tell whether a process of a rank has ended, has been silent, or has been replaced by another one.

        Args:
            rank: Its rank.
            process: Its number.
            is_sought: Something has failed, so a few seconds of silence are enough.
        """
        beat = self._table.beats.get(rank)
        if beat is None or beat.process < process:
            return False
        if beat.process > process or beat.state != "alive" or rank in self._table.gone():
            return True
        return self._table.n_quiet(rank) >= (_SILENT_BEATS if is_sought else self._patient_beats)

    def learns_of_failure(self) -> bool:
        """Wait a few seconds for a report of a failure; return whether there was one."""
        self._await_news()
        return self.failed.is_set()

    def stuck_store(self) -> str:
        """Return a sentence if no beat has gone through for a few seconds; else an empty one."""
        is_stuck = self._pulse.is_alive and self._pulse.since_beat_s > _SETTLE_S
        return f"{self.store_host()} has not answered for {_SETTLE_S:g} s" if is_stuck else ""

    def fail(self, reason: str) -> None:
        """Report to the others that this rank ends, and why, unless another rank is known to have failed before it."""
        self._failure.own = f"{self._me} failed: {reason}"
        self._pulse.await_beat(_LAST_WORDS_S)
        self._failure.blame(self._failure.own)

    def explain(self, error: BaseException | None, doing: str) -> RunError:
        """Find the rank that caused an error, waiting a few seconds for its report.

        Args:
            error: exception of a collective; None if a wait timed out.
            doing: activity of this rank, as the beginning of the sentence.

        Returns:
            An error that names the ranks that are dead or have not arrived, or else repeats `error`.
        """
        if self.learns_of_failure():
            return RunError(f"{doing}: {self.cause}")
        if self._store_has_left():
            return RunError(f"{doing}: {self.store_host()} has left, after it waited for this rank")
        if stuck := self.stuck_store():
            return RunError(f"{doing}: {stuck}")
        if late := name_late(self._known()):
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
        if self._pulse.said == "alive" and not self._failure:
            self._pulse.await_beat(self._timeout_s)
        elif self._pulse.said == "alive" and self._pulse.since_beat_s < _LAST_WORDS_S:
            self._pulse.await_beat(_LAST_WORDS_S)
        if self._hosts_store:
            self._outlast_others()
        self._pulse.end(_LAST_WORDS_S)

    def _outlast_others(self) -> None:
        """Keep the store until no rank needs it any more, or the timeout is over. Then say who is missing."""
        ends_well = not self._failure
        deadline_s = time.monotonic() + self._timeout_s
        missing = self._need_store()
        while missing and self._pulse.is_alive and time.monotonic() < deadline_s:
            self._pulse.await_beat(0.1)
            time.sleep(0.01)
            missing = self._need_store()
        if ends_well and (missing or self.cause):
            late = f"{ranks_have([beat.rank for beat in missing])} not answered at the end for {self._timeout_s:g} s"
            print(f"{self._me}, which hosts the store, leaves: {self.cause or late}", file=sys.stderr, flush=True)  # noqa: T201

    def store_host(self) -> str:
        """Describe the host and address of the store."""
        rank, address = self._store_host
        who = "torchrun" if rank is None else str(self._table.beats.get(rank, f"rank {rank}"))
        return f"{who}, which hosts the store at {address},"

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

    def compare_calls(self) -> str:
        """Name the calls of the ranks if they differ, or else the steps that they have begun; empty if all agree."""
        return compare_calls(self._known())

    def beat_counts(self) -> dict[int, int]:
        """Return the number of heartbeats of each rank so far."""
        return {rank: beat.count for rank, beat in self._table.beats.items()}

    def compare_with_passers(self, step: int, counts: Mapping[int, int]) -> str:
        """Compare calls as `compare_calls` does if a rank will never come to the exchange in which this rank waits.

        That is certain of a rank that has begun a step without an exchange that is before the step on all ranks.

        Args:
            step: The step that follows the exchange.
            counts: `beat_counts()` of the beginning of the wait. The other ranks have to beat twice since.

        Returns:
            The differences; empty if no rank has passed the exchange.
        """
        others = self._table.others
        has_passed = any((beat.step or 0) > step and beat.n_exchanges <= self.n_exchanges for beat in others)
        is_current = all(_has_read(beat, counts) for beat in others if beat.state == "alive")
        return self.compare_calls() if has_passed and is_current else ""

    def _known(self) -> dict[int, Heartbeat]:
        """Return the table with what this rank would send now."""
        return self._table.beats | {self._me.rank: self._words()}

    @property
    def _hosts_store(self) -> bool:
        return self._store_host[0] == self._me.rank

    @property
    def _patient_beats(self) -> int:
        """Beats for which another rank may be silent while nothing is known to have failed."""
        return max(_SILENT_BEATS, math.ceil(self._timeout_s / BEAT_S))

    def _store_has_left(self) -> bool:
        """Return whether the host of the store has said that it leaves, so the store may be gone at any time."""
        return self._last_words_of_host() is not None

    def _needs_store(self) -> bool:
        """Return whether the host of the store should wait for this rank. After a failure no exchange matters."""
        last = self._last_words_of_host()
        return last is None or (self.n_exchanges < last.n_exchanges and not self._failure)

    def _last_words_of_host(self) -> Heartbeat | None:
        rank, _ = self._store_host
        host = None if rank is None else self._table.beats.get(rank)
        return None if host is None or host.state == "alive" else host

    def _beat_on(self) -> float | None:
        """Do a beat. Return the time to the next one; None if no other rank waits for it, or if the store is gone.

        The host of the store also waits for the others, so it goes on after its final message.
        """
        if self._pulse.said != "alive" and not self._hosts_store:
            return None
        try:
            words = self._beat()
        except RuntimeError as error:  # includes DistError of torch
            if not (self._leaving or self._store_has_left()):
                self._failure.blame(f"{self.store_host()} is gone ({str(error).splitlines()[0]})")
            return None
        if not (self._hosts_store or words.needs_store):
            return None
        self._end_with_parent()
        return BEAT_S if self._table.is_full.is_set() and not self._leaving else 0.05

    def _beat(self) -> Heartbeat:
        """Look at the others first, so that this rank's final message names the first cause. Return what it says."""
        gone = self._table.gone()
        self._table.read()
        self._judge(gone)
        if self._failure.own:
            self._failure.blame(self._failure.own)
        words = self._words()
        self._table.write(words)
        self._pulse.note(words.state)
        return words

    def _words(self) -> Heartbeat:
        failed = self._failure.own or (self._leaving and self.cause)
        state: Literal["alive", "failed", "done"] = "failed" if failed else "done" if self._leaving else "alive"
        return replace(
            self._me,
            count=self._pulse.n_beats + 1,
            position=self.position,
            state=state,
            cause=self.cause,
            step=self.step,
            n_exchanges=self.n_exchanges,
            call=self.call,
            needs_store=self._needs_store(),
        )

    def _judge(self, gone: set[int]) -> None:
        """Name the first rank that failed, is gone, or is silent, in this order."""
        if self._own_end.left_behind is not None:
            self._judge_own(self._own_end.left_behind())
            return
        others = self._table.others
        for beat in others:
            if beat.state == "failed":
                self._failure.blame(beat.cause)
        expected = [beat for beat in others if beat.state == "alive" and beat.needs_store]
        for beat in expected:
            if beat.rank in gone:
                self._failure.blame(f"{beat} ended without a word (killed?)")
        n_silent = _SILENT_BEATS if self._failure.is_sought else self._patient_beats
        for beat in expected:
            n_quiet = self._table.n_quiet(beat.rank)
            if n_quiet >= n_silent:
                silent_s = n_quiet * BEAT_S
                self._failure.blame(f"{beat} has been silent for {silent_s:g} s: its process or machine stands still")

    def _judge_own(self, why: str) -> None:
        """End this rank if the others went on without it, whatever it does."""
        if not why:
            return
        self._failure.blame(why)
        now_s = time.monotonic()
        self._own_end.known_s = self._own_end.known_s or now_s
        if now_s - self._own_end.known_s > _LAST_WORDS_S + _SETTLE_S:
            print(f"{self._me}: {why}", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(1)  # the main thread hangs

    def _end_with_parent(self) -> None:
        if self._own_end.parent in (None, os.getppid()):
            return
        print(f"{self._me}: the process that started it is gone; it ends too", file=sys.stderr, flush=True)  # noqa: T201
        self._failure.blame(f"{self._me} lost the process that started it")
        os.kill(self._me.pid, signal.SIGTERM)
        time.sleep(_LAST_WORDS_S + _SETTLE_S)
        os._exit(1)  # the main thread is blocked in native code

    def _await_news(self) -> None:
        """Wait until a failure is known, or long enough to be sure that there is none."""
        begin_s = time.monotonic()
        self._failure.is_sought = True
        while not self.failed.wait(0.05) and self._pulse.is_alive and not self._store_has_left():
            waited_s = time.monotonic() - begin_s
            alive = [beat for beat in self._table.beats.values() if beat.state == "alive"]
            doubtful = any(self._table.n_quiet(beat.rank) > 3 for beat in alive)
            if waited_s > _SETTLE_S + (_SILENT_BEATS * BEAT_S if doubtful else 0.0):
                return

    def _need_store(self) -> list[Heartbeat]:
        """Return the other ranks that need the store. After a failure, one that has fallen silent is left out."""
        gone = self._table.gone()
        alive = [beat for beat in self._table.others if beat.rank not in gone and beat.state == "alive"]
        if self._failure:
            alive = [beat for beat in alive if self._table.n_quiet(beat.rank) < _SILENT_BEATS]
        return [beat for beat in alive if beat.needs_store]

    def _absent(self, timeout_s: float) -> str:
        missing = self._table.missing
        if len(missing) == self._table.n_ranks:
            return f"{self.store_host()} has not answered for {timeout_s:g} s"
        return (
            f"{ranks_have(missing)} not answered the roll call of {self._table.n_ranks} ranks within "
            f"{timeout_s:g} s: see the output there, and that all have the same WORLD_SIZE, MASTER_ADDR, MASTER_PORT "
            "and SIMDIST_SECRET"
        )


def _has_read(beat: Heartbeat, counts: Mapping[int, int]) -> bool:
    """Return whether a rank has sent two beats since `counts`: the second began after it, and so read the table."""
    return beat.count >= counts.get(beat.rank, 0) + 2
