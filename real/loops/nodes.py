"""How many ranks each machine has, and what that means for a schedule.

torchrun tells each rank the number of its own machine only (`LOCAL_WORLD_SIZE`), and machines may differ. So the ranks
tell each other. Most schedules need no machines. For the others, machines must be equal.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from real.processes.launch import Connection
from simdist.errors import ScenarioError
from simdist.schedules import Job, Schedule
from simdist.schedules.job import Shape

_SET_BY_TORCHRUN = "LOCAL_WORLD_SIZE"
_SET_BY_SLURM = "SLURM_NTASKS_PER_NODE"


def meet_nodes(connection: Connection, environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Return how many ranks each machine has, in order; nothing if a rank does not know. All ranks take part.

    Raises:
        ScenarioError: The numbers of the ranks contradict each other.
    """
    texts = connection.exchange("ranks of each machine", environ.get(_SET_BY_TORCHRUN, ""))
    if not all(text.isdecimal() and int(text) for text in texts):
        return ()
    sizes: list[int] = []
    first = 0
    while first < len(texts):
        size = int(texts[first])
        members = texts[first : first + size]
        if len(members) < size or set(members) != {texts[first]}:
            found = ", ".join(texts)
            raise ScenarioError(
                f"{_SET_BY_TORCHRUN} is {found} on ranks 0 to {len(texts) - 1}, so machines do not have consecutive "
                f"ranks: number them machine by machine, or write launch=real.Launch(ranks_per_node=...)"
            )
        sizes.append(size)
        first += size
    return tuple(sizes)


def ranks_per_node_for(
    schedule: Schedule,
    world_size: int,
    given: int | None,
    nodes: Sequence[int],
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Return the ranks of one machine for a schedule.

    Args:
        schedule: The schedule.
        world_size: Number of ranks.
        given: What the script says, which counts. None takes the machines.
        nodes: Ranks of each machine. Empty takes torchrun's number for all.
        environ: Environment variables that torchrun has set.

    Raises:
        ScenarioError: The number is not known or does not divide the ranks; or the schedule needs equal machines.
    """
    if given is None and len(set(nodes)) > 1:
        if _needs_nodes(schedule, world_size):
            raise ScenarioError(
                f"{schedule.name} needs machines with equal numbers of ranks, and {_described(nodes)}: start as many "
                f"ranks on each, take a schedule without levels of nodes, or write "
                f"launch=real.Launch(ranks_per_node=1), which takes each rank for a machine"
            )
        return 1
    text = environ.get(_SET_BY_TORCHRUN, "")
    if given is None and not nodes and not text.isdecimal():
        by_slurm = f"; under srun, int(os.environ[{_SET_BY_SLURM!r}])" if "SLURM_PROCID" in environ else ""
        raise ScenarioError(f"{_SET_BY_TORCHRUN} is not set, as torchrun does: write ranks_per_node=...{by_slurm}")
    ranks_per_node = given if given is not None else nodes[0] if nodes else int(text)
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise ScenarioError(f"ranks_per_node={ranks_per_node} does not divide {world_size} ranks")
    return ranks_per_node


def _needs_nodes(schedule: Schedule, world_size: int) -> bool:
    """Tell whether a schedule does different things on machines of different sizes."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    problems = {tuple(schedule.problems(Shape(world_size, size))) for size in sizes}
    if len(problems) > 1:
        return True
    if problems != {()}:
        return False
    tensors = (64 * world_size, 64 * world_size)
    jobs = (Job(world_size, size, 4, tensor_counts=tensors, tensor_rows=(8, 8)) for size in sizes)
    return len({_digest(schedule, job) for job in jobs}) > 1


def _digest(schedule: Schedule, job: Job) -> str:
    cycle = schedule.cycle(job)
    return schedule.plan(replace(job, n_steps=cycle.start + len(cycle) + 1)).digest()


def _described(nodes: Sequence[int]) -> str:
    """Say how many ranks machines have, and name those that differ from most.

    >>> _described((1, 3))
    'nodes have 1 and 3 ranks (node 0: 1)'
    """
    sizes = sorted(set(nodes))
    usual = max(sizes, key=lambda size: (Counter(nodes)[size], size))
    others = [f"node {number}: {size}" for number, size in enumerate(nodes) if size != usual]
    more = f" and {len(others) - 8} more" if len(others) > 8 else ""
    all_sizes = " and ".join([", ".join(map(str, sizes[:-1])), str(sizes[-1])])
    return f"nodes have {all_sizes} ranks ({', '.join(others[:8])}{more})"
