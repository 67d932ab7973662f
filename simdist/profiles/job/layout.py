"""Which ranks share a machine, from names of hosts and numbers of GPUs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

from simdist.errors import ScenarioError
from simdist.profiles.job.job import TracedJob
from simdist.profiles.steps.model import RankProfile
from simdist.settings.base import listed

_T = TypeVar("_T")


class UnknownLayoutError(ScenarioError):
    """Only the user knows which ranks share a machine."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The machines and their ranks; consecutive ranks share a machine."""

    nodes: int
    gpus_per_node: int
    source: str
    notes: tuple[str, ...] = ()

    def node(self, rank: int) -> int:
        """Return the machine of a rank."""
        return rank // self.gpus_per_node

    def spans(self, group: Sequence[int]) -> bool:
        """Tell whether a group has members on several machines."""
        return len({self.node(rank) for rank in group}) > 1


def find_layout(job: TracedJob, *, nodes: int | None = None, gpus_per_node: int | None = None) -> RankLayout:
    """Return the nodes of ranks, as requested or else by evidence in the traces.

    The strongest evidence comes first: hosts in the traces, GPUs that ranks cannot share, the numbering of GPUs by
    launchers, hosts in the names of files. Each piece narrows the possible sizes of a machine.

    Raises:
        ScenarioError: The requested layout does not divide the ranks.
        UnknownLayoutError: The evidence allows several layouts.
    """
    world_size = job.world_size
    if nodes is not None or gpus_per_node is not None:
        asked = _asked(world_size, nodes, gpus_per_node)
        unlike = [name for name, fits, is_weak in _evidence(job) if not is_weak and not fits(asked.gpus_per_node)]
        notes = [f"warning: {name} do not agree with {asked.source}, which counts" for name in unlike]
        return replace(asked, notes=tuple(notes))
    left = [size for size in range(1, world_size + 1) if world_size % size == 0]
    if world_size == 1:
        return RankLayout(1, 1, "one rank")
    source = ""
    notes = list[str]()
    for name, fits, is_weak in _evidence(job):
        fitting = [size for size in left if fits(size)]
        if not fitting and source:
            notes.append(f"{name} do not agree with {source}, which count")
        elif len(fitting) < len(left) and not (is_weak and fitting in ([], [1])):  # names may just all be different
            source = name
            left = fitting
    if len(left) == 1:
        return RankLayout(world_size // left[0], left[0], source, tuple(notes))
    raise UnknownLayoutError(_question(job, left))


_Evidence = tuple[str, Callable[[int], bool], bool]  # description, test of the ranks per machine, whether it is weak


def _evidence(job: TracedJob) -> Iterator[_Evidence]:
    """Yield the evidence for the nodes of ranks, the strongest first."""
    hosts, names = (_told(job, attrgetter(of)) for of in ("hostname", "file_host"))
    gpus = _told_gpus(job)
    if hosts:
        yield "names of hosts in the traces", partial(_fits_hosts, hosts), False
    if gpus:
        yield "GPUs of the machines", partial(_have_own_gpus, job, gpus), False
        numbered = (all(gpu == rank % n for rank, gpu in gpus.items()) for n in range(1, job.world_size + 1))
        sizes = [n for n, fits in enumerate(numbered, start=1) if fits]
        if not sizes and len(set(gpus.values())) == job.world_size:
            sizes = [job.world_size]
        if sizes:
            yield "numbers of GPUs in the traces", sizes.__contains__, False
    if len(names) == len(job.ranks):
        yield "hosts in the names of files", partial(_fits_hosts, names), True


def _told(job: TracedJob, fact: Callable[[RankProfile], _T | None]) -> dict[int, _T]:
    """Return the evidence in the traces of ranks."""
    told = ((rank, fact(each)) for rank, each in zip(job.ranks, job.profiles, strict=True))
    return {rank: value for rank, value in told if value is not None}


def _told_gpus(job: TracedJob) -> dict[int, int]:
    """Return the numbers of GPUs; nothing if each rank may see only one GPU, which is always number 0."""
    gpus = _told(job, attrgetter("local_gpu"))
    return gpus if any(gpus.values()) or _n_gpus(job) > 1 else {}


def _n_gpus(job: TracedJob) -> int:
    """Return the number of GPUs that ranks see on a machine; 0 if the traces do not show it."""
    return max(_told(job, attrgetter("n_gpus")).values(), default=0)


def _question(job: TracedJob, left: Sequence[int]) -> str:
    """Return the error that asks which ranks share a machine, and states the known facts."""
    gpus = _told_gpus(job)
    n_gpus = _n_gpus(job)
    hosts, names = (len(set(_told(job, attrgetter(of)).values())) for of in ("hostname", "file_host"))
    known = [f"{len(job.ranks)} of {job.world_size} ranks were traced"]
    if hosts or names:
        known.append(f"{hosts or names} names of hosts in {'the traces' if hosts else 'names of files'}")
    if gpus:
        known.append(f"ranks on GPUs {listed(sorted(set(gpus.values())))}" + (f" of {n_gpus}" if n_gpus else ""))
    elif job.profiles[0].device == "cuda":
        known.append("every rank sees one GPU, number 0")
    legal = ", ".join(str(job.world_size // size) for size in reversed(left))
    choice = f"give --nodes ({legal}) or --gpus-per-node" if left else "give --nodes or --gpus-per-node"
    return f"the traces do not tell which ranks share a machine, and links depend on it ({'; '.join(known)}): {choice}"


def _asked(world_size: int, nodes: int | None, gpus_per_node: int | None) -> RankLayout:
    option, count = ("--nodes", nodes) if nodes is not None else ("--gpus-per-node", gpus_per_node)
    both = f" x {gpus_per_node} GPUs" if nodes is not None and gpus_per_node is not None else ""
    if not count or count < 1 or world_size % count or (both and (gpus_per_node or 0) * count != world_size):
        legal = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ScenarioError(f"{option} {count}{both}: the traces are of {world_size} ranks; write one of {legal}")
    n_nodes = count if nodes is not None else world_size // count
    return RankLayout(n_nodes, world_size // n_nodes, option)


def _fits_hosts(hosts: dict[int, str], size: int) -> bool:
    """Tell whether ranks share a host exactly if their `rank // size` is equal."""
    places = {(rank // size, host) for rank, host in hosts.items()}
    return len(places) == len({node for node, _ in places}) == len({host for _, host in places})


def _have_own_gpus(job: TracedJob, gpus: dict[int, int], size: int) -> bool:
    """Return whether this many ranks of a machine have distinct GPUs."""
    places = {(rank // size, gpu) for rank, gpu in gpus.items()}
    return len(places) == len(gpus) and size <= (_n_gpus(job) or size)
