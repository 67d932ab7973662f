"""The other ranks, as a user's script meets them: connected by us under torchrun, or by the script itself."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from real.collectives import byte_transfer
from real.execution.executor import Watch
from real.processes.heartbeat import ranks_have
from real.processes.launch import Connection, connect
from real.processes.rendezvous import bounded
from simdist.errors import RunError

_PATIENCE_S = 1800.0  # a checkpoint may be large, and the disk slow


@dataclass(frozen=True)
class Ranks:
    """The ranks of the default process group.

    Args:
        device: Of computation on this rank.
        collectives_block: Collectives of tensors on `device` hold up who calls them, as those of gloo do.
        connection: With a guard, if we made it; None if the script has made the process group itself.
        timeout_s: For each wait for others.
    """

    device: torch.device
    collectives_block: bool
    connection: Connection | None
    timeout_s: float
    _unguarded: "_Unguarded" = field(default_factory=lambda: _Unguarded())

    @property
    def rank(self) -> int:
        """Who this is."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """How many there are."""
        return dist.get_world_size()

    @property
    def backend(self) -> str:
        """The library that moves tensors on `device`."""
        return "gloo" if self.collectives_block else "nccl"

    @property
    def watch(self) -> Watch:
        """Knows whether another rank has failed; nothing, if the script has connected the ranks itself."""
        return self.connection.guard if self.connection else self._unguarded

    def agree(self, what: str, value: str) -> None:
        """Compare a value over all ranks.

        Raises:
            RunError: Names the ranks whose value differs, or that did not come.
        """
        if self.connection:
            self.connection.agree(what, value)
            return
        values = self.exchange(what, f"{what}: {value}")
        if strays := [rank for rank, each in enumerate(values) if each != values[0]]:
            raise RunError(f"{what} must be the same on every rank: {ranks_have(strays)} another than rank 0")

    def exchange(self, what: str, value: str) -> list[str]:
        """Return the values of all ranks, by rank.

        Raises:
            RunError: Names the ranks that did not come.
        """
        if self.connection:
            return self.connection.exchange(what, value)
        return byte_transfer.gather_texts(value)

    def explain(self, error: BaseException, doing: str) -> RunError:
        """Turn what a collective raised into an error that names who is to blame, as far as that is known."""
        if self.connection:
            return self.connection.guard.explain(error, doing)
        return RunError(f"{doing}: {type(error).__name__}: {error}")

    def patient_group(self) -> dist.ProcessGroup | None:
        """Make a group of all ranks for tensors of the host that waits for half an hour; all ranks take part."""
        made = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENCE_S))
        return made if isinstance(made, dist.ProcessGroup) else None

    def wait(self, function: Callable[[], None], doing: str) -> None:
        """Call a function that waits for other ranks; give up when one of them has failed, or after half an hour.

        Raises:
            RunError: Says so.
        """
        guard = self.connection.guard if self.connection else None
        try:
            bounded(function, _PATIENCE_S, lambda: f"{doing} has taken more than {_PATIENCE_S:g} s", guard)
        except RuntimeError as error:
            raise error if isinstance(error, RunError) else self.explain(error, doing) from error


@contextmanager
def meet_ranks(device: torch.device, timeout_s: float, environ: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """Connect the ranks, unless the script has done so.

    Args:
        device: Of the model.
        timeout_s: For each wait for others.
        environ: Variables that torchrun has set.

    Raises:
        RunError: Somebody is missing; the model is on a GPU that other ranks use; the script's process group cannot
            move what there is to move.
    """
    if dist.is_available() and dist.is_initialized():
        yield Ranks(device, _collectives_block(device), None, timeout_s)
        return
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ
    where: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    with connect(device=where, timeout_s=timeout_s, environ=environ, exit_with_parent=by_torchrun) as connection:
        if connection.device != device:
            raise RunError(
                f"rank {connection.place.rank}: the model is on {device}, this rank computes on {connection.device}: "
                f'write model.to(torch.device("cuda", int(os.environ["LOCAL_RANK"])))'
            )
        yield Ranks(device, connection.backend == "gloo", connection, timeout_s)


@dataclass(slots=True)
class _Unguarded:
    """Watches no ranks."""

    position: int = 0
    failed: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Do nothing."""


def _collectives_block(device: torch.device) -> bool:
    """Tell whether collectives on a device are those of gloo; refuse a process group that lacks what we need."""
    config = str(dist.get_backend_config())
    backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    if backends.get("cpu") != "gloo" or backends.get(device.type) not in {"gloo", "nccl"}:
        raise RunError(
            f"the process group moves tensors by {config}; to synchronise a model on {device.type} it must be made by "
            f'init_process_group("{"gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"}"), or by real.wrap itself'
        )
    return backends[device.type] == "gloo"
