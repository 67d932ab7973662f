"""The place of this process among the ranks, and a store that all ranks reach.

If torchrun's agent does not host the store (`TORCHELASTIC_USE_AGENT_STORE`), rank 0 hosts it, only at the address of
the job, until its process ends: when ranks meet again, others may come before it. All keys contain the number of
restarts and that of the meeting, so that none reads keys of an earlier one. An agent that joins later counts fewer
restarts; with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, each start of ranks has a store of its own instead.
If the script has made a process group, rank 0 hosts another store, and sends its address through that group.
"""

import hmac
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from real.processes.heartbeat import Guard
from real.processes.signing import SignedStore
from simdist.errors import RunError

_T = TypeVar("_T")
_TOLD_NBYTES = 256
_TOLD_TAG = 0x5D157  # a tag that the script's messages do not use
_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEETINGS = itertools.count()  # of this process
_PORT_ADVICE = "choose another --master-port, or use torchrun --standalone on one machine"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a process among the others.

    Args:
        rank: 0 to world_size - 1.
        world_size: number of processes.
        local_rank: rank among the processes of this machine.
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
    """Read the place of this process from the environment that torchrun sets.

    Raises:
        RunError: a variable is missing, or not a number in range.
    """
    if missing := [name for name in _SET_BY_TORCHRUN if not environ.get(name)]:
        not_set = f"not started by torchrun: {', '.join(missing)} not set in the environment"
        if "SLURM_PROCID" in environ:
            raise RunError(f"{not_set}; under srun, set them from Slurm's variables: {_of_slurm(missing)}")
        raise RunError(
            f"{not_set}; start with: torchrun --standalone --nproc-per-node N, and your script or -m real RUN"
        )
    names = _SET_BY_TORCHRUN[:4]
    try:
        rank, world_size, local_rank, local_world_size = (int(environ[name]) for name in names)
    except ValueError:
        found = ", ".join(f"{name}={environ[name]!r}" for name in names)
        raise RunError(f"the environment must hold whole numbers, found {found}") from None
    for name, value, limit in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, local_world_size)):
        if not 0 <= value < limit:
            raise RunError(f"{name}={value} is not in 0..{limit - 1}; torchrun sets these")
    return RankPlace(rank, world_size, local_rank, local_world_size)


def _of_slurm(names: Sequence[str]) -> str:
    """Return shell commands that set variables from those of a task that srun has started."""
    values = {
        "RANK": "$SLURM_PROCID",
        "WORLD_SIZE": "$SLURM_NTASKS",
        "LOCAL_RANK": "$SLURM_LOCALID",
        "LOCAL_WORLD_SIZE": "$SLURM_NTASKS_PER_NODE",
        "MASTER_ADDR": "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)",
        "MASTER_PORT": "29500",
    }
    return f"srun bash -c 'export {' '.join(f'{name}={values[name]}' for name in names)}; python SCRIPT'"


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The connections to a store that all ranks reach.

    Args:
        store: for process groups.
        agreed: the same for signed values.
        watch: for the guard, which waits on the other connections must not block.
        server: the store itself, if this process hosts it; it lives as long as this object.
        hosted_by: the rank that hosts it; None if torchrun's agent does.
        at: its address and port, for messages.
        sent: messages that are in flight as long as this object lives.
    """

    store: Store
    agreed: SignedStore
    watch: SignedStore
    server: Store | None
    hosted_by: int | None
    at: str
    sent: Sequence[dist.Work | None] = ()


def meet(here: RankPlace, environ: Mapping[str, str], timeout_s: float) -> StoreAccess:
    """Reach the store, host it if this is the rank to do so, and register this rank.

    All ranks must meet equally often.

    Raises:
        RunError: the store is not reached in time, the port is taken, or the rank is registered already.
    """
    address = environ["MASTER_ADDR"]
    port = _port(environ["MASTER_PORT"])
    hosted_by = None if environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) else 0
    has_new_store = environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    n_restarts = "0" if has_new_store else environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"real/{n_restarts}/{next(_MEETINGS)}"
    secret = hmac.digest(environ.get("SIMDIST_SECRET", "").encode(), prefix.encode(), "sha256")
    server = _serve_to_the_end(_me(here), address, port) if here.rank == hosted_by else None
    at = f"{address}:{port}"
    store, agreed, watch = _reach(here, at, prefix, secret, hosted_by=hosted_by, timeout_s=timeout_s)
    return StoreAccess(store, agreed, watch, server, hosted_by, at)


def meet_within(here: RankPlace, environ: Mapping[str, str], timeout_s: float) -> StoreAccess:
    """Reach a store that rank 0 hosts; rank 0 sends address and secret through the default process group.

    Raises:
        RunError: rank 0 does not send the address of its store, or the store is not reached in time.
    """
    message = torch.zeros(_TOLD_NBYTES, dtype=torch.uint8)
    server = None
    sent = []
    if here.rank == 0:
        local = environ.get("LOCAL_WORLD_SIZE") == str(here.world_size)
        addresses = [] if local else [environ.get("MASTER_ADDR", ""), socket.gethostname()]
        server = _serve(_me(here), [*filter(None, addresses), "127.0.0.1"], 0)
        told = json.dumps([f"{server.host}:{server.port}", secrets.token_hex(32)]).encode()
        message[: len(told)] = torch.tensor(list(told), dtype=torch.uint8)
        with suppress(RuntimeError):  # a rank is gone: the roll call names it
            sent += [dist.isend(message, dst=rank, tag=_TOLD_TAG) for rank in range(1, here.world_size)]
    else:
        silence = (
            f"{_me(here)}: rank 0 has not come within {timeout_s:g} s; see the output there, and that it calls wrap"
        )
        try:
            work = dist.irecv(message, src=0, tag=_TOLD_TAG)
            assert work is not None
            bounded(lambda: work.wait(timedelta(seconds=timeout_s)), timeout_s + 1.0, lambda: silence)
        except RuntimeError as error:
            raise RunError(f"{silence} ({_first_line(error)})") from error
    at, secret = json.loads(bytes(message.tolist()).rstrip(b"\0"))
    store, agreed, watch = _reach(here, at, "wrap", secret.encode(), hosted_by=0, timeout_s=timeout_s)
    return StoreAccess(store, agreed, watch, server, 0, at, sent)


def host_job(at: str) -> TCPStore:
    """Host the store of a job whose replicas come and go, until this process ends.

    Args:
        at: Address and port; port 0 takes a free one.

    Raises:
        RunError: The port is taken, or the address is not of this machine.
    """
    address, port = _address(at)
    return _serve(socket.gethostname(), [address], port)


def reach_job(at: str, timeout_s: float) -> Store:
    """Return a connection to the store of a job.

    Raises:
        RunError: It is not reached in time.
    """
    address, port = _address(at)
    silence = f"the store of the job at {at} does not answer within {timeout_s:g} s"
    advice = f"see that `python -m real RUN --meet {at}` runs there, and that {address} is reachable from here"
    try:
        return bounded(lambda: _client(address, port, timeout_s), timeout_s, lambda: f"{silence}; {advice}")
    except RunError:
        raise
    except RuntimeError as error:
        raise RunError(f"{silence} ({_first_line(error)}); {advice}") from error


def _address(at: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT."""
    address, _, port = at.rpartition(":")
    if not address or not port.isdecimal() or int(port) >= 2**16:
        raise RunError(f"--meet {at}: write HOST:PORT, e.g. node0:29400")
    return address, int(port)


def _me(here: RankPlace) -> str:
    return f"rank {here.rank} ({socket.gethostname()})"


def _reach(
    here: RankPlace, at: str, prefix: str, secret: bytes, *, hosted_by: int | None, timeout_s: float
) -> tuple[Store, SignedStore, SignedStore]:
    """Return a connection to the store, the same for signed values, and one for the guard."""
    me = _me(here)
    who = "torchrun" if hosted_by is None else f"rank {hosted_by}"
    silence = f"{me}: {who}, which hosts the store at {at}, does not answer within {timeout_s:g} s"
    advice = f"see that it runs, is reachable from here, and no other program has the port; {_PORT_ADVICE}"
    address, _, port = at.rpartition(":")

    def reach() -> tuple[Store, SignedStore, SignedStore]:
        store, watch = (PrefixStore(prefix, _client(address, int(port), timeout_s)) for _ in range(2))
        agreed = SignedStore(store, secret)
        if agreed.add(f"seat/{here.rank}") > 1:
            raise RunError(
                f"{me} found its rank taken by another process in the store at {at}: two were started with "
                f"this RANK, or another run uses the port; {_PORT_ADVICE}"
            )
        return store, agreed, SignedStore(watch, secret)

    try:
        return bounded(reach, timeout_s, lambda: f"{silence}; {advice}")
    except RunError:
        raise
    except RuntimeError as error:
        raise RunError(f"{silence} ({_first_line(error)}); {advice}") from error


@cache
def _serve_to_the_end(me: str, address: str, port: int) -> TCPStore:
    return _serve(me, [address], port)


def _serve(me: str, addresses: Sequence[str], port: int) -> TCPStore:
    """Host a store only at the first of these addresses that this machine has; port 0 takes a free one."""
    try:
        listener = _listen(addresses, port)
        address, port = listener.getsockname()[:2]
        descriptor = listener.detach()
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
            use_libuv=False,  # with libuv, torch 2.4 does not accept a descriptor
        )
    except (OSError, RuntimeError) as error:
        why = _first_line(error)
        raise RunError(
            f"{me} cannot host the store at port {port} of {addresses[0]} ({why}); {_PORT_ADVICE}"
        ) from error


def _listen(addresses: Sequence[str], port: int) -> socket.socket:
    problem = OSError("its address is not known")
    for address in addresses:
        with suppress(socket.gaierror):
            for family, *_, where in sorted(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)):
                try:
                    return socket.create_server((str(where[0]), port), family=family, backlog=socket.SOMAXCONN)
                except OSError as error:
                    problem = error
    raise problem


def _client(address: str, port: int, timeout_s: float) -> Store:
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def _port(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 2**16:
        return int(text)
    raise RunError(f"MASTER_PORT must be a port from 1 to 65535, found {text!r}")


def bounded(function: Callable[[], _T], timeout_s: float, late: Callable[[], str], guard: Guard | None = None) -> _T:
    """Call a function that native code may block for ever, and give up after a time limit.

    It runs in a separate thread, so that signals still reach the main thread. If it is late, the thread is abandoned.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again in the waiting thread
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + timeout_s
    while thread.is_alive():
        thread.join(0.05)
        if guard is not None and not errors:
            guard.check()
        if thread.is_alive() and time.monotonic() > deadline_s:
            raise RunError((guard.stuck_store() if guard else "") or late())
    if errors:
        raise errors[0]
    return results[0]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def own_address() -> str:
    """Return the address of this machine for other ranks: the one on the route to the first of these hosts."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError as error:
            raise RunError(f"no way from {socket.gethostname()} to {host} (MASTER_ADDR): {error}") from error
        return str(probe.getsockname()[0])
