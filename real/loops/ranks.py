"""The other ranks, as a user's script meets them: connected by us under torchrun, or by the script itself.

They are watched in any case. Where the script has made a process group, that stays as it is; what we send goes through
groups of our own, which have our timeout.
"""

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from real.collectives import byte_transfer
from real.processes.launch import Backend, Connection, connect, connect_within
from real.processes.rendezvous import bounded
from simdist.errors import RunError

T = TypeVar("T")
_PATIENCE_S = 1800.0  # a checkpoint may be large, and the disk slow
_LOOK_S = 0.2  # between two looks whether another rank has failed


def average(connection: Connection, tensors: Iterable[Tensor]) -> None:
    """Replace tensors on the device by their means over all ranks, unless they are the same everywhere.

    Raises:
        RunError: A rank is missing.
    """
    tensors = list(tensors)
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.flatten().view(torch.uint8).cpu().numpy().data)
    with connection.guard.explaining("the average"):
        if len(set(connection.exchange("the average", hashed.hexdigest()))) == 1:
            return
        if not dist.is_initialized():
            raise RunError("the average: the process group was destroyed before worker.close(); do that after it")
        for tensor in tensors:
            tensor.div_(connection.place.world_size)
            dist.all_reduce(tensor, group=connection.group)
        if connection.device.type == "cuda":
            torch.cuda.synchronize(connection.device)


def last_of(active: bool, group: dist.ProcessGroup) -> int | None:
    """Return the last rank that is active, as all ranks learn together; None if none is."""
    flags = byte_transfer.gather_rows(torch.tensor([active]), group=group).flatten().tolist()
    return max((rank for rank, each in enumerate(flags) if each), default=None)


def patient_group(connection: Connection) -> dist.ProcessGroup:
    """Make a group of all ranks for tensors of the host that waits for half an hour; all ranks take part."""
    made = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENCE_S))
    assert isinstance(made, dist.ProcessGroup)
    connection.made.append(made)
    return made


def wait(connection: Connection, function: Callable[[], T], doing: str) -> T:
    """Call a function that waits for other ranks; give up when one of them has failed, or after half an hour.

    Raises:
        RunError: Says so.
    """
    late = f"{doing} has taken more than {_PATIENCE_S:g} s"
    with connection.guard.explaining(doing):
        return bounded(function, _PATIENCE_S, lambda: late, connection.guard)


@contextmanager
def meet_ranks(device: torch.device, timeout_s: float, environ: Mapping[str, str] = os.environ) -> Iterator[Connection]:
    """Connect the ranks; where the script has done so, watch them, and leave its process group as it is.

    Args:
        device: Of the model.
        timeout_s: For each wait for others.
        environ: Variables that torchrun has set.

    Raises:
        RunError: Somebody is missing; the model is on a GPU that other ranks use; the script's process group cannot
            move what there is to move; another rank has failed.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ
    where: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    if dist.is_available() and dist.is_initialized():
        connected = connect_within(
            _backend_for(device), device, timeout_s=timeout_s, environ=environ, exit_with_parent=by_torchrun
        )
    else:
        connected = connect(device=where, timeout_s=timeout_s, environ=environ, exit_with_parent=by_torchrun)
    with connected as connection, _naming_who_failed(connection):
        if connection.device != device:
            raise RunError(
                f"rank {connection.place.rank}: the model is on {device}, this rank computes on {connection.device}: "
                f'write model.to(torch.device("cuda", int(os.environ["LOCAL_RANK"])))'
            )
        yield connection


@contextmanager
def _naming_who_failed(connection: Connection) -> Iterator[None]:
    """Name the rank that failed first, where this one fails because of it; or else stands still in its collectives."""
    guard = connection.guard
    over = threading.Event()

    def end_if_held_up() -> None:
        while not over.wait(_LOOK_S):
            guard.find_stuck_store(_LOOK_S)
            if guard.failed.is_set() and not over.wait(connection.timeout_s):
                print(f"rank {connection.place.rank} waits for what will not come: {guard.cause}", file=sys.stderr)  # noqa: T201
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
    """Return what moves tensors on a device; refuse a process group that lacks what we need."""
    config = str(dist.get_backend_config())
    backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    if backends.get("cpu") != "gloo" or backends.get(device.type) not in {"gloo", "nccl"}:
        raise RunError(
            f"the process group moves tensors by {config}; to synchronise a model on {device.type} it must be made by "
            f'init_process_group("{"gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"}"), or by real.wrap itself'
        )
    return "gloo" if backends[device.type] == "gloo" else "nccl"
