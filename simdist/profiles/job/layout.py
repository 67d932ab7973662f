"""Which ranks share a machine: from names of hosts, or numbers of GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

from simdist.errors import ScenarioError
from simdist.profiles.job.job import TracedJob


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Machines and the ranks of each; consecutive ranks share one.

    Args:
        nodes: Machines.
        gpus_per_node: Ranks of each.
        source: How that is known.
        notes: Assumptions.
    """

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
    """Return where ranks are, by what was asked for, else by names of hosts, else by numbers of GPUs, else one machine.

    Raises:
        ScenarioError: The layout that was asked for does not divide the ranks.
    """
    world_size = job.world_size
    if nodes is not None or gpus_per_node is not None:
        return _asked(world_size, nodes, gpus_per_node)
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    hosts = {rank: each.hostname for rank, each in zip(job.ranks, job.profiles, strict=True)}
    gpus = {rank: each.local_gpu for rank, each in zip(job.ranks, job.profiles, strict=True)}
    if all(hosts.values()):
        legal = [size for size in sizes if _fits_hosts(hosts, size)]
        fitting = [size for size in legal if _fits_gpus(gpus, size)] or legal
        if fitting:
            return RankLayout(world_size // fitting[-1], fitting[-1], "names of hosts in the traces")
        note = (
            f"{len(set(hosts.values()))} hosts do not hold equally many consecutive ranks: taken for one node; give "
            f"--nodes or --gpus-per-node"
        )
        return RankLayout(1, world_size, "assumed", (note,))
    if any(gpus.values()) and (fitting := [size for size in sizes if _fits_gpus(gpus, size)]):
        return RankLayout(world_size // fitting[0], fitting[0], "numbers of GPUs in the traces")
    if world_size == 1:
        return RankLayout(1, 1, "one rank")
    told = "all ranks use GPU 0" if set(gpus.values()) == {0} else "the traces do not tell which ranks share a machine"
    note = f"warning: {told}: taken for one node; links depend on it: give --nodes or --gpus-per-node"
    return RankLayout(1, world_size, "assumed", (note,))


def _asked(world_size: int, nodes: int | None, gpus_per_node: int | None) -> RankLayout:
    option, count = ("--nodes", nodes) if nodes is not None else ("--gpus-per-node", gpus_per_node)
    both = f" x {gpus_per_node} GPUs" if nodes is not None and gpus_per_node is not None else ""
    if not count or count < 1 or world_size % count or (both and (gpus_per_node or 0) * count != world_size):
        legal = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ScenarioError(f"{option} {count}{both}: the traces are of {world_size} ranks; write one of {legal}")
    n_nodes = count if nodes is not None else world_size // count
    return RankLayout(n_nodes, world_size // n_nodes, option)


def _fits_hosts(hosts: dict[int, str | None], size: int) -> bool:
    """Tell whether exactly the ranks of equal `rank // size` share a host."""
    places = {(rank // size, host) for rank, host in hosts.items()}
    return len(places) == len({node for node, _ in places}) == len({host for _, host in places})


def _fits_gpus(gpus: dict[int, int | None], size: int) -> bool:
    return all(gpu is None or gpu == rank % size for rank, gpu in gpus.items())
