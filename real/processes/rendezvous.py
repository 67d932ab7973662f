"""Where this process stands, and a store that all ranks reach.

Where torchrun's agent does not host the store (`TORCHELASTIC_USE_AGENT_STORE`), rank 0 does. All keys carry the count
of restarts, so that a restarted run never reads what the one before it wrote.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from real.processes.heartbeat import Guard
from simdist.errors import RunError

T = TypeVar("T")
SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PORT_ADVICE = "choose another --master-port, or use torchrun --standalone on one machine"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Holds where a process stands among the others.

    Args:
        rank: 0 to world_size - 1.
        world_size: number of processes.
        local_rank: the same among the processes of this machine.
        local_world_size: number of processes on this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def node(self) -> int:
        """The number of its machine; ranks of a machine are consecutive."""
        return self.rank // self.local_world_size


def place(environ: Mapping[str, str]) -> RankPlace:
    """Read this process's place from the environment that torchrun sets.

    Raises:
        RunError: a variable is missing or is no number in range.
    """
    if missing := [name for name in SET_BY_TORCHRUN if not environ.get(name)]:
        raise RunError(
            f"not started by torchrun: {', '.join(missing)} not set in the environment; "
            "start with: torchrun --standalone --nproc-per-node N -m real RUN"
        )
    names = SET_BY_TORCHRUN[:4]
    try:
        rank, world_size, local_rank, local_world_size = (int(environ[name]) for name in names)
    except ValueError:
        found = ", ".join(f"{name}={environ[name]!r}" for name in names)
        raise RunError(f"the environment must hold whole numbers, found {found}") from None
    for name, value, limit in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, local_world_size)):
        if not 0 <= value < limit:
            raise RunError(f"{name}={value} is not in 0..{limit - 1}; torchrun sets these")
    return RankPlace(rank, world_size, local_rank, local_world_size)


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Holds the connections to a store that all ranks reach.

    Args:
        store: for everything but the guard.
        watch: for the guard, which a wait on the other must not hold up.
        server: the store itself, if this process hosts it; it lives as long as this object.
        hosted_by: the rank that hosts it; None if torchrun's agent does.
        at: its address and port, for messages.
    """

    store: Store
    watch: Store
    server: Store | None
    hosted_by: int | None
    at: str


def meet(here: RankPlace, environ: Mapping[str, str], timeout_s: float) -> StoreAccess:
    """Reach the store, hosting it if that is this rank's part, and take this rank's seat there.

    Raises:
        RunError: the store is not reached in time, the port is taken, or so is the seat.
    """
    address, port = environ["MASTER_ADDR"], _port(environ["MASTER_PORT"])
    hosted_by = None if environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) else 0
    prefix = f"real/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    me = f"rank {here.rank} ({socket.gethostname()})"
    server = _serve(me, port, timeout_s) if here.rank == hosted_by else None
    who = "torchrun" if hosted_by is None else "rank 0"
    silence = f"{me}: {who}, which hosts the store at {address}:{port}, does not answer within {timeout_s:g} s"
    advice = f"see that it runs, is reachable from here, and no other program has the port; {PORT_ADVICE}"

    def reach() -> tuple[Store, Store]:
        store, watch = (PrefixStore(prefix, _client(address, port, timeout_s)) for _ in range(2))
        if store.add(f"seat/{here.rank}", 1) > 1:
            raise RunError(
                f"{me} found its rank taken by another process in the store at {address}:{port}: two were started with "
                f"this RANK, or another run uses the port; {PORT_ADVICE}"
            )
        return store, watch

    try:
        store, watch = bounded(reach, timeout_s, lambda: f"{silence}; {advice}")
    except RunError:
        raise
    except RuntimeError as error:
        raise RunError(f"{silence} ({_first_line(error)}); {advice}") from error
    return StoreAccess(store, watch, server, hosted_by, f"{address}:{port}")


def _serve(me: str, port: int, timeout_s: float) -> Store:
    limit = timedelta(seconds=timeout_s)
    try:
        return TCPStore("localhost", port, is_master=True, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise RunError(f"{me} cannot host the store at port {port} ({_first_line(error)}); {PORT_ADVICE}") from error


def _client(address: str, port: int, timeout_s: float) -> Store:
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def _port(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 2**16:
        return int(text)
    raise RunError(f"MASTER_PORT must be a port from 1 to 65535, found {text!r}")


def bounded(function: Callable[[], T], timeout_s: float, late: Callable[[], str], guard: Guard | None = None) -> T:
    """Call a function that native code may hold up for ever, and give up on it in time.

    It runs in a thread of its own, so that signals still reach the main thread, and is left behind if it is late.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again where it is waited for
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + timeout_s
    while thread.is_alive():
        thread.join(0.05)
        if guard is not None and not errors:
            guard.check()
        if thread.is_alive() and time.monotonic() > deadline_s:
            raise RunError(late())
    if errors:
        raise errors[0]
    return results[0]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
