"""Which ranks, groups and links cannot differ in a run, so that one of each stands for all.

Ranks are *alike* if they begin alike, their operations take equally long, and the groups that they meet in are alike.
Groups are alike if they have alike members and put as many bytes on alike links. Links are alike if they are equally
fast and alike groups put as many bytes on them. The coarsest such partition is found by refinement: all that begin
alike have one colour, and then the colours of what each is connected with split them, until no colour splits.

Alike ranks have the same times: exchange two of them, with their groups and links, and the run is the same. So the
engine needs one rank of each colour. A link of a colour carries several flows of alike groups. They have one rate, so
one flow with several times the load stands for them.

Colours are numbers of 64 bits. That two different ones are equal by chance is less likely than a fault of the memory.

Source:
    Grohe et al., Color Refinement and its Applications (2017): the coarsest equitable partition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.cost.costs import Costs, Shared, Stage, used_by
from simdist.plan.group import Group

_Colours: TypeAlias = NDArray[np.uint64]
_Numbers: TypeAlias = NDArray[np.int64]

_START = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Meetings:
    """An operation's groups, one of each kind.

    Args:
        group_of: Number of the group of each rank that stands for others.
        members: Its members, by group.
        alone_s: Seconds of each group whose links no other transfer may want.
        stages: Otherwise, of each group: its stages, on links that stand for others.
    """

    group_of: list[int]
    members: list[list[int]]
    alone_s: list[float]
    stages: list[tuple[Stage, ...]] | None

    @property
    def content(self) -> tuple[object, ...]:
        """All that it says, to compare."""
        members = tuple(map(tuple, self.members))
        stages = tuple(tuple(map(_content, each)) for each in self.stages or ())
        return tuple(self.group_of), members, tuple(self.alone_s), stages


@dataclass(frozen=True, eq=False, slots=True)
class Partition:
    """Ranks by kind.

    Kinds have an order that does not depend on the numbers of ranks. So stragglers on other ranks often give the same
    meetings, and a run that begins alike takes the same course.

    Args:
        form: Number of its meetings and links: equal for partitions that have equal ones.
        of_ranks: Kind of each rank, `[world_size]`.
        firsts: First rank of each kind, `[n_kinds]`. It stands for the others.
        of_links: Kind of each link that others may want, `[n_links]`.
        meetings: The groups of each collective, by `id` of its price.
        capacity_Bps: Of the links that stand for others.
    """

    form: int
    of_ranks: _Numbers
    firsts: _Numbers
    of_links: _Numbers
    meetings: dict[int, Meetings]
    capacity_Bps: NDArray[np.float64]


class Symmetry:
    """The ranks, groups and links of a plan.

    Args:
        costs: Its price list. Groups begin and end together.
        world_size: Ranks.
    """

    def __init__(self, costs: Costs, world_size: int) -> None:
        contested = {id(costs.of[op]) for op in costs.contested}
        self._traffic: dict[int, _Traffic] = {}
        self._groups: dict[Group, _Groups] = {}
        for cost in costs.of.values():
            if isinstance(cost, Shared) and id(cost) not in self._traffic:
                if cost.group not in self._groups:
                    self._groups[cost.group] = _Groups(cost.group, world_size)
                found = _Traffic(cost, self._groups[cost.group], has_links=id(cost) in contested)
                self._traffic[id(cost)] = found
        links = [each.links for each in self._traffic.values()]
        self._links = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *links]))
        for each in self._traffic.values():
            each.links = np.searchsorted(self._links, each.links)
        for number, groups in enumerate(self._groups.values()):
            groups.finish(number, [each for each in self._traffic.values() if each.groups is groups])
        self._capacity_Bps = costs.capacity_Bps[self._links]
        self._known: dict[bytes, Partition] = {}
        self._forms: dict[tuple[object, ...], int] = {}
        self._numbers = count()

    @property
    def n_links(self) -> int:
        """Number of links that others may want."""
        return len(self._links)

    def partition(self, begins: _Numbers) -> Partition:
        """Return the coarsest partition that keeps ranks apart that begin in different ways.

        Args:
            begins: How each rank begins, and what it does on its own, as a number, `[world_size]`.
        """
        key = begins.tobytes()
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._found(begins.astype(np.uint64))
        return self._known[key]

    def _form(self, content: tuple[object, ...]) -> int:
        """Return the number of what a partition consists of. A content that was forgotten gets another number."""
        if content not in self._forms:
            if len(self._forms) >= _MOST_KNOWN:
                self._forms.clear()
            self._forms[content] = next(self._numbers)
        return self._forms[content]

    def _found(self, ranks: _Colours) -> Partition:
        links = mixed(self._capacity_Bps.view(np.uint64))
        colours = {group: each.begin for group, each in self._groups.items()}
        n_before = 0
        while True:
            n_colours = sum(len(np.unique(each)) for each in (ranks, links, *colours.values()))
            if n_colours <= n_before:
                break
            n_before = n_colours
            on_links = np.zeros_like(links)
            of_ranks = mixed(ranks)
            for group, groups in self._groups.items():
                np.add.at(on_links, groups.links, mixed(groups.carries, colours[group][groups.of_pairs]))
                of_links = np.zeros_like(colours[group])
                np.add.at(of_links, groups.of_pairs, mixed(groups.carries, links[groups.links]))
                of_members = of_ranks[groups.members].sum(axis=1, dtype=np.uint64)
                colours[group] = mixed(colours[group], of_members, of_links)
            links = mixed(links, on_links)
            ranks = mixed(ranks, *(colours[group][groups.group_of] for group, groups in self._groups.items()))
        _, firsts, kind_of_ranks = np.unique(ranks, return_index=True, return_inverse=True)
        _, first_links, kind_of_links = np.unique(links, return_index=True, return_inverse=True)
        meetings = {
            key: each.of_kinds(colours[each.groups.group], firsts, kind_of_ranks, first_links, kind_of_links)
            for key, each in self._traffic.items()
        }
        capacity_Bps = self._capacity_Bps[first_links]
        content = (*(each.content for each in meetings.values()), capacity_Bps.tobytes())
        form = self._form(content)
        return Partition(form, kind_of_ranks, firsts, kind_of_links, meetings, capacity_Bps)


_MOST_KNOWN = 256


class _Groups:
    """The groups that some collectives have in common, and the bytes that they put on links.

    Attributes:
        group: How they divide the ranks.
        members: Ranks of each group, `[n_groups, size]`.
        group_of: Group of each rank.
        begin: Colour of each group by itself.
        of_pairs: Group of each pair of a stage and a link.
        links: Its link.
        carries: Colour of what it carries.
    """

    def __init__(self, group: Group, world_size: int) -> None:
        self.group = group
        self.members = np.array(group.members(world_size))
        self.group_of = np.empty(world_size, dtype=np.int64)
        self.group_of[self.members] = np.arange(len(self.members))[:, np.newaxis]
        self.begin: _Colours = np.zeros(len(self.members), dtype=np.uint64)
        self.of_pairs = np.zeros(0, dtype=np.int64)
        self.links = np.zeros(0, dtype=np.int64)
        self.carries = np.zeros(0, dtype=np.uint64)

    def finish(self, number: int, collectives: "Sequence[_Traffic]") -> None:
        """Take the bytes of all collectives of these groups. The number tells these groups from others."""
        self.begin = mixed(np.full_like(self.begin, number), *(each.begin for each in collectives))
        self.of_pairs = np.concatenate([each.of_pairs for each in collectives])
        self.links = np.concatenate([each.links for each in collectives])
        numbers = enumerate(collectives)
        carries = [mixed(np.full_like(each.carries, number), each.carries) for number, each in numbers]
        self.carries = np.concatenate(carries)


class _Traffic:
    """The bytes that each group of a collective puts on links.

    Attributes:
        groups: Its groups.
        begin: Colour of each group by its seconds or its stages.
        of_pairs: Group of each pair of a stage and a link.
        links: Its link.
        carries: Colour of what it carries: the place of the stage, its latency, its bytes and those of the link.
    """

    def __init__(self, cost: Shared, groups: _Groups, *, has_links: bool) -> None:
        self.groups = groups
        n_groups = len(groups.members)
        self._alone_s = np.broadcast_to(np.asarray(cost.alone_s, dtype=np.float64), (n_groups,)).copy()
        self._has_links = has_links
        self.begin: _Colours = np.zeros(n_groups, dtype=np.uint64) if has_links else self._alone_s.view(np.uint64)
        self.of_pairs = np.zeros(0, dtype=np.int64)
        self.links = np.zeros(0, dtype=np.int64)
        self._places = np.zeros(0, dtype=np.int64)
        self.carries = np.zeros(0, dtype=np.uint64)
        self._nbytes = np.zeros(0)
        self._stages: dict[tuple[int, int], Stage] = {}  # group, place
        if has_links:
            self._find_links(cost)

    def _find_links(self, cost: Shared) -> None:
        of_pairs: list[_Numbers] = []
        links: list[_Numbers] = []
        carries: list[_Colours] = []
        places: list[_Numbers] = []
        nbytes: list[NDArray[np.float64]] = []
        stages = np.zeros_like(self.begin)
        for groups, place, stage, used in used_by(cost.transfers):
            most_nbytes = float(stage.nbytes.max(initial=0.0))
            common = mixed(_bits(place), _bits(stage.latency_s), _bits(most_nbytes))
            stages[groups] = mixed(stages[groups], np.broadcast_to(common, groups.shape))
            for group in groups.tolist():
                self._stages[group, place] = stage
            of_pairs.append(np.repeat(groups, used.shape[1]))
            links.append(used.ravel())
            nbytes.append(np.tile(stage.nbytes, len(groups)))
            places.append(np.full(used.size, place))
            carries.append(mixed(np.broadcast_to(common, used.size), nbytes[-1].view(np.uint64)))
        self.begin = stages
        if of_pairs:
            self.of_pairs, self.links, self._places = map(np.concatenate, (of_pairs, links, places))
            self.carries = np.concatenate(carries)
            self._nbytes = np.concatenate(nbytes)

    def of_kinds(
        self, colours: _Colours, firsts: _Numbers, of_ranks: _Numbers, first_links: _Numbers, of_links: _Numbers
    ) -> Meetings:
        """Return the groups of the ranks that stand for others."""
        _, first_groups, of_groups = np.unique(colours, return_index=True, return_inverse=True)
        members = [sorted(set(of_ranks[self.groups.members[group]].tolist())) for group in first_groups.tolist()]
        alone_s = self._alone_s[first_groups].tolist()
        group_of = of_groups[self.groups.group_of[firsts]].tolist()
        if not self._has_links:
            return Meetings(group_of, members, alone_s, None)
        loads = self._loads(of_groups, first_links, of_links)
        stages = [self._of_kind(group, loads[number]) for number, group in enumerate(first_groups.tolist())]
        return Meetings(group_of, members, alone_s, stages)

    def _loads(
        self, of_groups: _Numbers, first_links: _Numbers, of_links: _Numbers
    ) -> list[dict[int, dict[int, float]]]:
        """Return the bytes that all groups of a kind put on a link that stands for others: place -> link -> bytes."""
        found: list[dict[int, dict[int, float]]] = [{} for _ in range(int(of_groups.max()) + 1)]
        stands = np.zeros(len(of_links), dtype=bool)
        stands[first_links] = True
        counted = np.flatnonzero(stands[self.links])
        rows = (of_groups[self.of_pairs], self._places, of_links[self.links], self._nbytes)
        for group, place, link, nbytes in zip(*(row[counted].tolist() for row in rows), strict=True):
            of_place = found[group].setdefault(place, {})
            of_place[link] = of_place.get(link, 0.0) + nbytes
        return found

    def _of_kind(self, group: int, loads: dict[int, dict[int, float]]) -> tuple[Stage, ...]:
        stages = []
        place = 0
        while (group, place) in self._stages:
            stage = self._stages[group, place]
            of_place = {link: nbytes for link, nbytes in sorted(loads.get(place, {}).items()) if nbytes}
            most_nbytes = float(stage.nbytes.max(initial=0.0))
            links = np.array(list(of_place), dtype=np.int64)
            each_nbytes = np.full(len(of_place), most_nbytes)
            stages.append(Stage(stage.latency_s, links, each_nbytes, np.array(list(of_place.values()))))
            place += 1
        return tuple(stages)


def mixed(first: _Colours, *others: _Colours) -> _Colours:
    """Return a colour for each combination of colours: equal ones for equal combinations."""
    found = _scrambled(first + _START)
    for other in others:
        found = _scrambled(found * _START + _scrambled(other + _START))
    return found


def _scrambled(numbers: _Colours) -> _Colours:
    """Return the finalizer of splitmix64 (Steele, Lea & Flood 2014) of numbers."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _bits(number: float) -> _Colours:
    return np.array([number], dtype=np.float64).view(np.uint64)


def _content(stage: Stage) -> tuple[object, ...]:
    assert stage.together_nbytes is not None
    arrays = (stage.resources, stage.nbytes, stage.together_nbytes)
    return stage.latency_s, *(each.tobytes() for each in arrays)
