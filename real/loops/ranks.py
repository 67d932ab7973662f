"""Connects a user's script to the other ranks.

The script may have made a process group. Otherwise this module makes one, under torchrun. In both cases it watches for
failed ranks. It leaves the script's process group unchanged, and has groups and a timeout of its own.
"""

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from real.collectives import byte_transfer
from real.processes.launch import Backend, Connection, connect, connect_within
from real.processes.rendezvous import bounded
from simdist.errors import RunError

_T = TypeVar("_T")
_PATIENCE_S = 1800.0  # a checkpoint may be large, and the disk slow
_PIECE_NBYTES = 2**24
_LOOK_S = 0.2  # between two checks whether another rank has failed


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks with which this rank exchanges parameters: all, or those with the same slice of a sharded model.

    Args:
        ranks: In order, with this rank.
        process_group: The same for torch; None means the default process group, or that the rank is alone.
    """

    ranks: tuple[int, ...]
    process_group: dist.ProcessGroup | None


def everyone(connection: Connection) -> Peers:
    """Return all ranks as peers."""
    return Peers(tuple(range(connection.place.world_size)), connection.group)


def meet_peers(connection: Connection, groups: Sequence[tuple[int, ...]]) -> Peers:
    """Make process groups of some ranks each, and return that of this rank. All ranks take part."""
    mine: Peers | None = None
    for ranks in groups:
        limit = timedelta(seconds=connection.timeout_s)
        made = dist.new_group(list(ranks), timeout=limit) if len(ranks) > 1 else None
        if connection.place.rank in ranks:
            assert made is None or isinstance(made, dist.ProcessGroup)
            connection.made.extend([made] if made else [])
            mine = Peers(ranks, made)
    assert mine is not None
    return mine


def average(
    connection: Connection, tensors: Iterable[Tensor], peers: Peers, *, what: str, before_step: int | None
) -> None:
    """Replace tensors on the device by their means over the peers, unless these have equal tensors.

    All ranks take part, each with its peers.

    Args:
        connection: To the other ranks.
        tensors: Tensors of this rank.
        peers: The ranks whose mean is taken.
        what: Name of the average, the same on all ranks.
        before_step: The step that follows on all ranks; None if ranks count different steps.

    Raises:
        RunError: A rank is missing, or at another average.
    """
    tensors = list(tensors)
    hashed = hashlib.sha256()
    for tensor in tensors:
        for piece in tensor.flatten().view(torch.uint8).split(_PIECE_NBYTES):
            hashed.update(piece.to("cpu", copy=True).numpy().data)  # memory that numpy sees could not be given back
    with connection.guard.explaining(what):
        found = connection.exchange(what, hashed.hexdigest(), before_step=before_step)
        if len({found[rank] for rank in peers.ranks}) == 1:
            return
        if not dist.is_initialized():
            raise RunError(f"{what}: the process group was destroyed before worker.close(); do that after it")
        for tensor in tensors:
            tensor.div_(len(peers.ranks))
            dist.all_reduce(tensor, group=peers.process_group)
        if connection.device.type == "cuda":
            torch.cuda.synchronize(connection.device)


def last_of(active: bool, group: dist.ProcessGroup) -> int | None:
    """Return the highest rank that is active, or None. All ranks take part."""
    flags = byte_transfer.gather_rows(torch.tensor([active]), group=group).flatten().tolist()
    return max((rank for rank, each in enumerate(flags) if each), default=None)


def patient_group(connection: Connection) -> dist.ProcessGroup:
    """Make a group of all ranks for host tensors, with a timeout of half an hour. All ranks take part."""
    made = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENCE_S))
    assert isinstance(made, dist.ProcessGroup)
    connection.made.append(made)
    return made


def wait(connection: Connection, function: Callable[[], _T], doing: str) -> _T:
    """Call a function that waits for other ranks. Give up if a rank has failed, or after half an hour.

    Raises:
        RunError: A rank has failed, or the time is up.
    """
    late = f"{doing} has taken more than {_PATIENCE_S:g} s"
    with connection.guard.explaining(doing):
        return bounded(function, _PATIENCE_S, lambda: late, connection.guard)


@contextmanager
def meet_ranks(
    device: torch.device, timeout_s: float, start_timeout_s: float, environ: Mapping[str, str] = os.environ
) -> Iterator[Connection]:
    """Connect the ranks, unless the script has done so. In both cases, watch for failed ranks.

    Args:
        device: Device of the model.
        timeout_s: Limit for each wait for other ranks.
        start_timeout_s: Limit for the start of all ranks, if it is longer.
        environ: Environment variables that torchrun has set.

    Raises:
        RunError: A rank is missing or has failed; the model is on a GPU that other ranks use; or the script's process
            group cannot move host tensors, or the tensors of the model.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ
    where: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    if dist.is_available() and dist.is_initialized():
        connected = connect_within(
            _backend_for(device),
            device,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            environ=environ,
            exit_with_parent=by_torchrun,
        )
    else:
        connected = connect(
            device=where,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            environ=environ,
            exit_with_parent=by_torchrun,
        )
    with connected as connection, _naming_who_failed(connection):
        if connection.device != device:
            raise RunError(
                f"rank {connection.place.rank}: the model is on {device}, this rank computes on {connection.device}: "
                f'write model.to(torch.device("cuda", int(os.environ["LOCAL_RANK"])))'
            )
        yield connection


@contextmanager
def _naming_who_failed(connection: Connection) -> Iterator[None]:
    """Name the rank that failed first if this one then fails or hangs in its collectives."""
    guard = connection.guard
    over = threading.Event()

    def end_if_held_up() -> None:
        while not over.wait(_LOOK_S):
            guard.find_stuck_store(_LOOK_S)
            if guard.failed.is_set() and not over.wait(connection.timeout_s):
                print(f"rank {connection.place.rank} waits for what will not come: {guard.cause}", file=sys.stderr)  # noqa: T201
                guard.leave()  # a host of the store waits until the others know the cause
                os._exit(1)

    thread = threading.Thread(target=end_if_held_up, name="end-if-held-up", daemon=True)
    thread.start()
    try:
        yield
    except RuntimeError as error:  # of a collective, ours or the script's, or of neither
        if isinstance(error, RunError) or not guard.learns_of_failure():
            raise
        raise RunError(guard.cause) from error
    finally:
        over.set()
        thread.join()


def _backend_for(device: torch.device) -> Backend:
    """Return the backend for tensors on a device. Raise an error if the process group is unsuitable."""
    config = str(dist.get_backend_config())
    backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    if backends.get("cpu") != "gloo" or backends.get(device.type) not in {"gloo", "nccl"}:
        raise RunError(
            f"the process group moves tensors by {config}; to synchronise a model on {device.type} it must be made by "
            f'init_process_group("{"gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"}"), or by real.wrap itself'
        )
    return "gloo" if backends[device.type] == "gloo" else "nccl"
