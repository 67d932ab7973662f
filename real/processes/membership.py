"""Which replicas of a job are there, as they agree through a store that outlives each of them.

A *membership* is a list of processes, one for each rank that is there. What they do together is an *event*, such as a
collective. Each votes when it has succeeded. The last voter writes the decision: done. If one fails, times out, or sees
that a member has ended, it says so. The others that live then say that they are here, and a decision lists the next
membership, without those that did not. A decision is written once, whoever writes it, so all act on the same one.

    done/M/EVENT        how many members of membership M have succeeded
    trouble/M/EVENT     why one has not
    here/M/EVENT/R      rank R lives, and waits for a decision
    decision/M/EVENT    whether it is done, and the next membership if there is one
    members/M           a membership
    waiting/R           a process of rank R is ready to join

A process that waits is taken in with a decision that an event is done. If no member lives, all ranks have to come, and
begin anew together.

Source:
    torchft (github.com/meta-pytorch/torchft): replicas that meet at a lighthouse, with a quorum for each step.
"""

import hmac
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar, final

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from real.processes.beats import ranks_have
from real.processes.heartbeat import Guard
from real.processes.launch import START_TIMEOUT_S, Connection, loopback
from real.processes.rendezvous import RankPlace, reach_job
from real.processes.signing import SignedStore
from simdist.errors import RunError

_T = TypeVar("_T")
_POLL_S = 0.02
_LOOK_S = 0.1  # between looks at the store while an event is under way
_GRACE_S = 1.0  # for members to say that they are here, after one has waited for the whole time-out
_MOST_TRIES = 5  # of one event by the same members


@dataclass(frozen=True, slots=True)
class Members:
    """A membership.

    Args:
        number: Its number.
        attempt: How often all ranks have begun before.
        first_step: The first step that it performs.
        processes: Rank -> number of its process.
        joining: Ranks that have no state yet.
        left: Rank -> its last process that the others went on without. It may still run.
    """

    number: int
    attempt: int
    first_step: int
    processes: Mapping[int, int]
    joining: tuple[int, ...] = ()
    left: Mapping[int, int] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """The ranks that are there, ascending."""
        return sorted(self.processes)

    @property
    def old(self) -> list[int]:
        """The ranks that have the state, ascending."""
        return [rank for rank in self.ranks if rank not in self.joining]

    def without(self, ranks: "list[int]") -> "Members":
        """Return the next membership, without some ranks."""
        there = {rank: process for rank, process in self.processes.items() if rank not in ranks}
        joining = tuple(rank for rank in self.joining if rank in there)
        left = {**self.left, **{rank: self.processes[rank] for rank in ranks}}
        return replace(self, number=self.number + 1, processes=there, joining=joining, left=left)

    def joined_by(self, come: Mapping[int, int], step: int) -> "Members":
        """Return the membership from a step on, with processes that join."""
        return replace(
            self,
            number=self.number + 1,
            first_step=step,
            processes={**self.processes, **come},
            joining=tuple(come),
        )

    def dumps(self) -> str:
        """Return it as JSON."""
        processes, left = (sorted(each.items()) for each in (self.processes, self.left))
        return json.dumps((self.number, self.attempt, self.first_step, processes, self.joining, left))

    @classmethod
    def loads(cls, text: str) -> "Members":
        """Read it."""
        number, attempt, first_step, processes, joining, left = json.loads(text)
        return cls(number, attempt, first_step, dict(processes), tuple(joining), dict(left))


@dataclass(frozen=True, slots=True)
class ReadyProcess:
    """A process that is ready to join.

    Args:
        process: Its number.
        started_s: When its libraries were loaded, in seconds since 1970.
        ready_s: When it was ready.
        saved: Steps in which its rank has written checkpoints.
    """

    process: int
    started_s: float
    ready_s: float
    saved: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Met(Generic[_T]):
    """How an event went.

    Args:
        result: What this rank got.
        begin_s: When it began on this rank, in seconds since 1970.
        lost: Ranks that were lost meanwhile, each with the moment when the others knew.
        upcoming: The membership from the next step on, if ranks join.
    """

    result: _T
    begin_s: float
    lost: Mapping[int, float]
    upcoming: Members | None = None


@final
class Membership:
    """The membership as this process knows it.

    Args:
        store: The store of the job.
        watch: Another connection to it, for the guard.
        rank: This rank.
        process: Number of this process among those of its rank.
        world_size: Number of ranks.
        timeout_s: Limit for each wait for others.

    Attributes:
        members: The membership; None before this process is admitted.
        guard: Watches the other processes.
        timeout_s: As given.
    """

    def __init__(
        self,
        store: SignedStore,
        watch: SignedStore,
        rank: int,
        process: int,
        world_size: int,
        *,
        timeout_s: float,
        at: str,
    ) -> None:
        self.members: Members | None = None
        self.timeout_s = timeout_s
        self.guard = Guard(
            watch,
            rank,
            world_size,
            store_at=at,
            store_rank=None,
            exit_with_parent=True,
            process=process,
            left_behind=self._left_behind,
        )
        self._store = store
        self._watch = watch
        self._rank = rank
        self._process = process
        self._world_size = world_size
        self._newest: Members | None = None
        self._seen: Members | None = None  # by the guard's thread

    def agree(self, what: str, value: str) -> None:
        """Refuse another value than that of the rank that was first.

        Raises:
            RunError: Names it.
        """
        if (found := self._store.propose(f"agreed/{what}", value)) != value:
            raise RunError(f"{what} must be the same on every rank; here it is {value!r}, and {found!r} elsewhere")

    # ---------------------------------------------------------------- who is there

    def newest(self) -> Members | None:
        """Return the newest membership; None if there was none yet."""
        self._newest = _newest(self._store, self._newest)
        return self._newest

    def is_live(self, members: Members) -> bool:
        """Tell whether a process of a membership lives."""
        return any(not self.guard.has_ended(rank, process) for rank, process in members.processes.items())

    def admitted(
        self, waiting: ReadyProcess, first_step: Callable[[Mapping[int, ReadyProcess]], int]
    ) -> Members | None:
        """Wait until this process is in a membership, and return it; None if the job is over.

        Args:
            waiting: What to tell of this process.
            first_step: Finds the first step if all ranks begin anew.

        Raises:
            RunError: Nobody is left, and not all ranks come to begin anew. Names those that are missing.
        """
        self._store.set(
            f"waiting/{self._rank}", json.dumps([waiting.process, waiting.started_s, waiting.ready_s, waiting.saved])
        )
        alone_s: float | None = None
        while True:
            self.guard.check()
            if self.is_over():
                return None
            newest = self.newest()
            if newest and newest.processes.get(self._rank) == self._process:
                self.members = newest
                return newest
            now_s = time.monotonic()
            if newest and self.is_live(newest):
                alone_s = None
            else:
                alone_s = alone_s or now_s
                there = {rank: self._waiting(rank, newest) for rank in range(self._world_size)}
                come = {rank: each for rank, each in there.items() if each}
                if len(come) == self._world_size:
                    number, attempt = (newest.number + 1, newest.attempt + 1) if newest else (1, 0)
                    processes = {rank: each.process for rank, each in come.items()}
                    self._publish(Members(number, attempt, first_step(come), processes))
                elif now_s - alone_s > self.start_timeout_s:
                    missing = [rank for rank, each in there.items() if each is None]
                    limit = f"{self.start_timeout_s:g} s"
                    raise RunError(f"{ranks_have(missing)} not come within {limit} to begin; see the output there")
            time.sleep(_POLL_S)

    @property
    def start_timeout_s(self) -> float:
        """How long ranks may take to start."""
        return max(self.timeout_s, START_TIMEOUT_S)

    def is_over(self) -> bool:
        """Tell whether the job is done."""
        return self._store.check("over")

    def end(self) -> None:
        """Say that the job is done."""
        self._store.set("over", "")

    def leave(self) -> None:
        """Say that no process of this rank will come any more, because the job is over."""
        self._store.set(f"left/{self._rank}", "")

    def say_gone(self) -> None:
        """Say that this process leaves, so that the others need not find out."""
        self._store.set(f"gone/{self._rank}/{self._process}", "")

    def waiting(self, rank: int) -> ReadyProcess | None:
        """Return what the newest process of a rank has said when it was ready."""
        text = self._store.get(f"waiting/{rank}")
        if text is None:
            return None
        process, started_s, ready_s, saved = json.loads(text)
        return ReadyProcess(process, started_s, ready_s, tuple(saved))

    def _waiting(self, rank: int, members: Members | None) -> ReadyProcess | None:
        """Return the process of a rank that is ready to join, if it lives and was not left behind."""
        found = self.waiting(rank)
        if found is None or self._has_ended(rank, found.process):
            return None
        return None if members and members.left.get(rank) == found.process else found

    def _has_ended(self, rank: int, process: int, *, is_sought: bool = False) -> bool:
        if self.guard.has_ended(rank, process, is_sought=is_sought):
            return True
        return rank != self._rank and self._store.check(f"gone/{rank}/{process}")

    def _publish(self, members: Members) -> Members:
        """Make a membership the next one, unless there is another one; return that which is."""
        return Members.loads(self._store.propose(f"members/{members.number}", members.dumps()))

    def _left_behind(self) -> str:
        """Say that the others went on without this process, if they did; in the guard's thread."""
        members = self.members
        if members is None:
            return ""
        self._seen = _newest(self._watch, self._seen or members)
        if self._seen is None or self._seen.processes.get(self._rank) == self._process:
            return ""
        return f"rank {self._rank} took no part, so the others went on without it; it has to join again"

    # ---------------------------------------------------------------- events

    def together(self, event: str, act: Callable[[Members], _T], *, admits_at: int | None = None) -> Met[_T]:
        """Do something with all that are there; again without those that are lost, until all have succeeded.

        Args:
            event: Its name, the same on all ranks.
            act: Does it, in a thread that is abandoned if others are lost meanwhile. It must not change what it reads.
            admits_at: Ranks that wait may join then at this step; None: not here.

        Raises:
            RunError: It fails again and again though nobody is lost, or this rank was left behind.
        """
        assert self.members is not None
        begin_s = time.time()
        lost: dict[int, float] = {}
        n_tries = 0
        while True:
            members = self.members
            n_tries += 1
            doing = _Doing(act, members)
            trouble = self._wait(f"{members.number}/{event}", doing)
            done, upcoming = self._settle(f"{members.number}/{event}", members, trouble, admits_at)
            if done:
                assert doing.results
                return Met(doing.results[0], begin_s, lost, upcoming)
            assert upcoming is not None
            gone = [rank for rank in members.ranks if rank not in upcoming.processes]
            n_tries = 0 if gone else n_tries
            if n_tries >= _MOST_TRIES:
                raise RunError(f"{event}: failed {n_tries} times, and all ranks live: {trouble}")
            lost |= dict.fromkeys(gone, time.time())
            self.members = upcoming
            if self._rank not in upcoming.processes:
                raise RunError(f"{event}: the others went on without this rank; it has to join again")

    def _wait(self, place: str, doing: "_Doing[_T]") -> str:
        """Wait for what this rank does in an event; return why it did not succeed, or an empty text."""
        begin_s = time.monotonic()
        looked_s = begin_s
        while doing.thread.is_alive():
            doing.thread.join(_POLL_S)
            self.guard.check()
            now_s = time.monotonic()
            if doing.thread.is_alive() and now_s - looked_s > _LOOK_S:
                looked_s = now_s
                if self._store.check(f"trouble/{place}"):
                    return "another rank has trouble"
                if ended := self._ended(doing.members, doing.members.ranks):
                    return f"{ranks_have(ended)} ended"
                if now_s - begin_s > self.timeout_s:
                    return _TIMED_OUT
        return "" if doing.results else doing.error

    def _ended(self, members: Members, ranks: list[int], *, is_sought: bool = False) -> list[int]:
        return [
            rank
            for rank in ranks
            if rank != self._rank and self._has_ended(rank, members.processes[rank], is_sought=is_sought)
        ]

    def _settle(self, place: str, members: Members, trouble: str, admits_at: int | None) -> tuple[bool, Members | None]:
        """Vote, and return the decision: whether the event is done, and the next membership if there is one."""
        if not trouble:
            if self._store.add(f"done/{place}") == len(members.processes):
                upcoming = None if admits_at is None else self._with_those_who_wait(members, admits_at)
                return self._decide(place, True, upcoming)
            trouble = self._await_votes(place, members)
        if trouble:
            self._store.propose(f"trouble/{place}", trouble)  # the first cause counts
            self._store.set(f"here/{place}/{self._rank}", "")
            self._await_those_here(place, members)
        return self._decide(place, False, None)

    def _await_votes(self, place: str, members: Members) -> str:
        """Wait for the decision; return why there is none, or an empty text."""
        begin_s = time.monotonic()
        looked_s = begin_s
        pause_s = 0.0005
        while not self._store.check(f"decision/{place}"):
            self.guard.check()
            now_s = time.monotonic()
            if now_s - looked_s > _LOOK_S:
                looked_s = now_s
                if self._store.check(f"trouble/{place}"):
                    return "another rank has trouble"
                if ended := self._ended(members, members.ranks):
                    return f"{ranks_have(ended)} ended"
                if now_s - begin_s > self.timeout_s:
                    return _TIMED_OUT
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 1.5 * pause_s)
        return ""

    def _await_those_here(self, place: str, members: Members) -> None:
        """Wait until a decision is there, or it is known who is here, and propose to go on without the others."""
        begin_s = time.monotonic()
        missing = members.ranks
        while not self._store.check(f"decision/{place}"):
            self.guard.check()
            missing = [rank for rank in missing if not self._store.check(f"here/{place}/{rank}")]
            ended = self._ended(members, missing, is_sought=True)
            patience_s = _GRACE_S if self._store.get(f"trouble/{place}") == _TIMED_OUT else self.timeout_s
            if ended == missing or time.monotonic() - begin_s > patience_s:
                self._decide(place, False, members.without(missing))
                return
            time.sleep(_POLL_S)

    def _decide(self, place: str, done: bool, upcoming: Members | None) -> tuple[bool, Members | None]:
        """Propose a decision, and return the one that counts."""
        text = json.dumps([done, upcoming.dumps() if upcoming else None])
        was_done, next_text = json.loads(self._store.propose(f"decision/{place}", text))
        return was_done, None if next_text is None else self._publish(Members.loads(next_text))

    def _with_those_who_wait(self, members: Members, step: int) -> Members | None:
        """Return the membership from a step on with those who wait; None if nobody does."""
        absent = (rank for rank in range(self._world_size) if rank not in members.processes)
        found = {rank: self._waiting(rank, members) for rank in absent}
        come = {rank: each.process for rank, each in found.items() if each}
        return members.joined_by(come, step) if come else None


_TIMED_OUT = "timed out"


@final
@dataclass(slots=True)
class _Doing(Generic[_T]):
    """What this rank does in an event, in a thread.

    Args:
        act: Does it.
        members: With whom.

    Attributes:
        results: What it got, once it has.
        error: Why it failed, if it did.
    """

    act: Callable[[Members], _T]
    members: Members
    results: list[_T] = field(default_factory=list)
    error: str = ""
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.results.append(self.act(self.members))
        except BaseException as error:  # the rank votes on it
            self.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def is_over(store: Store) -> bool:
    """Tell whether the job of a store is done."""
    return _signed(store).check("over")


def has_left(store: Store, rank: int) -> bool:
    """Tell whether a rank of a job that is over has left."""
    return _signed(store).check(f"left/{rank}")


def _signed(store: Store) -> SignedStore:
    secret = hmac.digest(os.environ.get("SIMDIST_SECRET", "").encode(), b"replicas", "sha256")
    return SignedStore(PrefixStore("replicas", store), secret)


def _newest(store: SignedStore, known: Members | None) -> Members | None:
    """Return the newest membership in a store, from a known one on."""
    number = 0 if known is None else known.number
    while text := store.get(f"members/{number + 1}"):
        known = Members.loads(text)
        number = known.number
    return known


@dataclass(frozen=True, slots=True)
class ReplicaConnection:
    """The connection of a replica to its job. `connect_replica` makes it.

    Args:
        connection: As other ranks have; its process group is missing, because replicas come and go.
        membership: Who is there.
        process: Number of this process among those of its rank.
        reach: Opens another connection to the store of the job.
    """

    connection: Connection
    membership: Membership
    process: int
    reach: Callable[[], Store]


@contextmanager
def connect_replica(at: str, rank: int, world_size: int, *, timeout_s: float) -> Iterator[ReplicaConnection]:
    """Reach the store of a job, and watch the other replicas until the end.

    Args:
        at: Address and port of the store.
        rank: This replica.
        world_size: All replicas.
        timeout_s: For each wait for others.

    Raises:
        RunError: The store is not reached, or replicas do not come at the first start. Names them.
    """
    here = RankPlace(rank, world_size, 0, 1)
    store, watch = (_signed(reach_job(at, timeout_s)) for _ in range(2))
    process = store.add(f"process/{rank}")
    membership = Membership(store, watch, rank, process, world_size, timeout_s=timeout_s, at=at)
    guard = membership.guard
    connection = Connection(here, torch.device("cpu"), "gloo", guard, store, timeout_s)
    try:
        with loopback(here, at.rpartition(":")[0]):
            guard.start(timeout_s, membership.start_timeout_s)
            yield ReplicaConnection(connection, membership, process, partial(reach_job, at, timeout_s))
            membership.leave()
    except BaseException as error:
        guard.fail(str(error) or type(error).__name__)
        raise
    finally:
        guard.leave()
