"""Rendezvous, roll call and process groups.

`torchrun` sets the rank of each process in its environment. `connect()` makes a process group from it, in which no wait
is endless. It reaches the store, each rank answers the roll call, all ranks agree on device and backend, and from then
on a guard watches the others. Each of these has a timeout, and an error that names the missing rank and the remedy.
`connect_within()` does the same next to an existing process group.
"""

import ipaddress
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from real.processes.beats import name_calls, ranks_have
from real.processes.heartbeat import Guard
from real.processes.rendezvous import RankPlace, StoreAccess, bounded, meet, meet_within, place
from real.processes.signing import SignedStore
from simdist.errors import RunError

__all__ = ["START_TIMEOUT_S", "Backend", "Connection", "RankPlace", "connect", "connect_within", "place"]

Backend = Literal["gloo", "nccl"]
START_TIMEOUT_S = 300.0  # as TCPStore of torch; one rank may load torch from a slow disk
#: With 1, NCCL from `SHARING_NCCL` on lets ranks share a GPU, as an experiment (its user guide, env.rst).
SHARES_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARING_NCCL = (2, 30)


@dataclass(frozen=True)
class Connection:
    """A rank's connection to the others; made by `connect`.

    Args:
        place: rank and world size.
        device: device of the tensors.
        backend: backend that moves tensors on `device`.
        guard: knows which ranks have failed.
        store: signed values of `exchange`.
        timeout_s: how long `agree` and `barrier` wait for the others.
        made: process groups that end with this connection. The first has all ranks, and the timeout.
    """

    place: RankPlace
    device: torch.device
    backend: Backend
    guard: Guard
    store: SignedStore
    timeout_s: float
    made: list[dist.ProcessGroup] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of all ranks, with the timeout; None means the default process group, while none is made."""
        return self.made[0] if self.made else None

    def share_token(self, nbytes: int) -> bytes:
        """Return random bytes that only the ranks know, because they do not go through the store."""
        token = torch.tensor(list(secrets.token_bytes(nbytes)), dtype=torch.uint8)
        dist.broadcast(token, src=0, group=self.group)
        return bytes(token.tolist())

    def exchange(self, what: str, value: str, *, before_step: int | None = None) -> list[str]:
        """Return the values of all ranks, by rank; all ranks must call this in the same order.

        Args:
            what: name of the exchange, the same on all ranks.
            value: value of this rank.
            before_step: step of the training loop that follows on all ranks. A rank that begins it without this
                exchange ends the wait. With None, only the timeout does.

        Raises:
            RunError: names the missing ranks.
        """
        missing = list(range(self.place.world_size))
        number = next(self._numbers)  # the n-th calls of all ranks meet
        counts = self.guard.beat_counts()

        def exchange() -> list[tuple[str, str, str]]:
            keys = [f"agree/{number}/{rank}" for rank in range(self.place.world_size)]
            self.store.set(keys[self.place.rank], json.dumps([what, value, self.guard.call]))
            texts: dict[int, str] = {}
            pause_s = 0.001
            while missing:
                come = [rank for rank in missing if self.store.check(keys[rank])]
                found = zip(come, self.store.multi_get([keys[rank] for rank in come]), strict=True)
                texts |= {rank: text for rank, text in found if text is not None}
                missing[:] = [rank for rank in missing if rank not in texts]
                if missing and before_step is not None:
                    self._check_passers(what, before_step, counts)
                time.sleep(pause_s if missing else 0.0)
                pause_s = min(0.1, pause_s * 1.5)
            return [tuple(json.loads(text)) for _, text in sorted(texts.items())]

        def late() -> str:
            if self.place.rank in missing:
                return f"{what}: {self.guard.store_host()} has not answered for {self.timeout_s:g} s"
            come = f"{what}: {ranks_have(missing)} not come within {self.timeout_s:g} s"
            differences = self.guard.compare_calls()
            return f"{come}: {differences}" if differences else f"{come}; see the output there"

        with self.guard.explaining(what):
            answers = bounded(exchange, self.timeout_s, late, self.guard)
        self.guard.n_exchanges += 1
        if any(other != what for other, _, _ in answers):
            places = {rank: f"came to {other!r}" for rank, (other, _, _) in enumerate(answers)}
            calls = {rank: call or places[rank] for rank, (_, _, call) in enumerate(answers)}
            raise RunError(f"{what}: {name_calls(calls, {}) or name_calls(places, {})}: ranks run different code")
        return [answer for _, answer, _ in answers]

    def _check_passers(self, what: str, step: int, counts: Mapping[int, int]) -> None:
        """Raise RunError if a rank has begun a step without the exchange before it."""
        if differences := self.guard.compare_with_passers(step, counts):
            raise RunError(f"{what}: {differences}")

    def agree(self, what: str, value: str, *, before_step: int | None = None) -> None:
        """Compare a value over all ranks; all ranks must call this in the same order.

        Args: see `exchange`.

        Raises:
            RunError: names the ranks with a different value, or the missing ranks.
        """
        values = self.exchange(what, value, before_step=before_step)
        common = max(values, key=values.count)
        if strays := [rank for rank, other in enumerate(values) if other != common]:
            found = ", ".join(f"{values[rank]!r} on rank {rank}" for rank in strays[:8])
            raise RunError(f"{what} must be the same on every rank; most have {common!r}, but found {found}")

    def barrier(self, what: str) -> None:
        """Wait until all ranks arrive.

        Raises:
            RunError: names the ranks that are missing, or at another place.
        """
        self.exchange(f"barrier {what!r}", "")


@contextmanager
def connect(
    *,
    backend: Literal["auto", "gloo", "nccl"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout_s: float = 60.0,
    start_timeout_s: float = START_TIMEOUT_S,
    environ: Mapping[str, str] = os.environ,
    exit_with_parent: bool = False,
) -> Iterator[Connection]:
    """Connect to the other ranks, and disconnect at the end.

    The default process group can always move CPU tensors with gloo.

    Args:
        backend: backend of the tensors; auto takes nccl if each rank has its own GPU, else gloo.
        device: device of the tensors; auto takes CUDA if available. Ranks may share a GPU under gloo.
        timeout_s: for each wait for others, such as a collective.
        start_timeout_s: for the start of all ranks, if it is longer: they load their libraries at different speeds.
        environ: environment set by torchrun.
        exit_with_parent: end this process when its parent is gone.

    Raises:
        RunError: names the missing rank, or the missing requirement of this rank.
    """
    here = place(environ)
    limits_s = timeout_s, max(timeout_s, start_timeout_s)
    meeting = meet(here, environ, limits_s[1])
    with _guarded(here, meeting, limits_s, exit_with_parent=exit_with_parent) as guard:
        start = Connection(here, torch.device("cpu"), "gloo", guard, meeting.agreed, timeout_s)
        gpus = start.exchange("the GPU of each rank", gpu_of(here))
        chosen, where = backend_and_device(here, backend, device, own_gpus=all(gpus) and len(set(gpus)) == len(gpus))
        connection = replace(start, device=where, backend=chosen)
        connection.agree("backend and device", f"{chosen} on {where.type}")
        with loopback(here, environ["MASTER_ADDR"]):
            # With its GPU, NCCL connects all ranks now, and need not guess the GPU of a barrier.
            bound = where if chosen == "nccl" else None
            _open_group(
                connection,
                lambda kinds, limit: dist.init_process_group(
                    kinds,
                    store=meeting.store,
                    rank=here.rank,
                    world_size=here.world_size,
                    timeout=limit,
                    device_id=bound,
                ),
            )
            assert dist.group.WORLD is not None
            connection.made.append(dist.group.WORLD)  # others with longer timeouts follow
            yield connection
            bounded(dist.destroy_process_group, timeout_s, lambda: "cannot leave the process group")


@contextmanager
def connect_within(
    backend: Backend,
    device: torch.device,
    *,
    timeout_s: float = 60.0,
    start_timeout_s: float = START_TIMEOUT_S,
    environ: Mapping[str, str] = os.environ,
    exit_with_parent: bool = False,
) -> Iterator[Connection]:
    """Watch the ranks of the default process group, which stays unchanged, and make another group with a timeout.

    Args:
        backend: backend that moves tensors on `device` in the default group; gloo moves those of the host.
        device: device of the tensors.
        timeout_s: for each wait for others.
        start_timeout_s: as for `connect`.
        environ: environment set by torchrun, if it has started the ranks.
        exit_with_parent: end this process when its parent is gone.

    Raises:
        RunError: names the missing rank.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    per_node = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    here = RankPlace(rank, world_size, int(environ.get("LOCAL_RANK", rank % per_node)), per_node)
    limits_s = timeout_s, max(timeout_s, start_timeout_s)
    meeting = meet_within(here, environ, limits_s[1])
    with _guarded(here, meeting, limits_s, exit_with_parent=exit_with_parent) as guard:
        connection = Connection(here, device, backend, guard, meeting.agreed, timeout_s)
        connection.agree("backend and device", f"{backend} on {device.type}")
        _open_group(
            connection, lambda kinds, limit: connection.made.append(dist.new_group(backend=kinds, timeout=limit))
        )
        yield connection
        for group in connection.made if dist.is_initialized() else ():  # the script may have destroyed all groups
            bounded(partial(dist.destroy_process_group, group), timeout_s, lambda: "cannot leave a process group")


@contextmanager
def _guarded(
    here: RankPlace, meeting: StoreAccess, limits_s: tuple[float, float], *, exit_with_parent: bool
) -> Iterator[Guard]:
    guard = Guard(
        meeting.watch,
        here.rank,
        here.world_size,
        store_at=meeting.at,
        store_rank=meeting.hosted_by,
        exit_with_parent=exit_with_parent,
    )
    try:
        guard.start(*limits_s)
        yield guard
    except BaseException as error:
        guard.fail(str(error) or type(error).__name__)
        raise
    finally:
        guard.leave()


def choose_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device of a process that is alone.

    Raises:
        RunError: It has no GPU, and `cuda` is asked for.
    """
    return backend_and_device(RankPlace(0, 1, 0, 1), "auto", device, own_gpus=True)[1]


def _n_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_of(here: RankPlace) -> str:
    """Return what tells the GPU of a rank from all others; empty if there is none.

    Numbers of GPUs do not: a launcher such as Slurm may show each rank one GPU, number 0.
    """
    n_gpus = _n_gpus()
    if not n_gpus:
        return ""
    number = here.local_rank % n_gpus
    unnamed = f"{socket.gethostname()} {number}"  # by torch before 2.5
    return str(getattr(torch.cuda.get_device_properties(number), "uuid", unnamed))


def backend_and_device(here: RankPlace, backend: str, device: str, *, own_gpus: bool) -> tuple[Backend, torch.device]:
    """Choose the backend and the device.

    Args:
        here: This rank.
        backend: As of `connect`; likewise `device`.
        device: See there.
        own_gpus: No two ranks share a GPU, and each has one. If they share, NCCL is taken only if it is asked for, and
            lets them.

    Raises:
        RunError: Names what this rank lacks.
    """
    n_gpus = _n_gpus()
    me = f"rank {here.rank} ({socket.gethostname()})"
    found = f"{n_gpus} GPUs for {here.local_world_size} ranks on this machine"
    on_cuda = device == "cuda" or backend == "nccl" or (device == "auto" and n_gpus > 0)
    if backend == "nccl" and device == "cpu":
        raise RunError("nccl moves tensors of GPUs only, and --device is cpu; use --backend gloo")
    if backend == "nccl" and n_gpus and not own_gpus:
        own_gpus = _nccl_shares_gpus()
    if backend == "nccl" and not (n_gpus and own_gpus):
        raise RunError(f"{me}: nccl needs a GPU for each rank, found {found}; use --backend gloo, or start fewer ranks")
    if backend == "nccl" and not dist.is_nccl_available():
        raise RunError(f"{me}: this build of torch has no nccl; use --backend gloo")
    if on_cuda and not n_gpus:
        raise RunError(f"{me}: --device cuda, and found {found}; use --device cpu --backend gloo")
    if not on_cuda:
        return "gloo", torch.device("cpu")
    takes_nccl = backend != "gloo" and own_gpus and dist.is_nccl_available()
    chosen: Backend = "nccl" if takes_nccl else "gloo"
    return chosen, torch.device("cuda", here.local_rank % n_gpus)


def _nccl_shares_gpus() -> bool:
    """Tell whether the user lets several ranks of NCCL share a GPU, and this NCCL can."""
    asked = os.environ.get(SHARES_GPU) == "1"
    return asked and dist.is_nccl_available() and torch.cuda.nccl.version()[:2] >= SHARING_NCCL


def _open_group(connection: Connection, make: Callable[[str, timedelta], object]) -> None:
    device = connection.device
    kinds = "cpu:gloo,cuda:nccl" if connection.backend == "nccl" else "gloo"
    limit = timedelta(seconds=connection.timeout_s)

    def choose_gpu() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own setting

    def init() -> None:
        choose_gpu()
        make(kinds, limit)

    choose_gpu()
    try:
        bounded(init, connection.timeout_s + 1.0, lambda: "timed out", connection.guard)
    except RuntimeError as error:
        raise connection.guard.explain(error, "opening the process group") from error


@contextmanager
def loopback(here: RankPlace, address: str) -> Iterator[None]:
    """Let gloo use the loopback interface if all ranks are on this machine, so the host name need not resolve."""
    local = here.local_world_size == here.world_size or _is_loopback(address)
    names = [name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}]
    if "GLOO_SOCKET_IFNAME" in os.environ or not local or not names:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = names[0]  # gloo reads it whenever a group is made
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
