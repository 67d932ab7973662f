"""Which engine computes a run exactly, with the least work: decided before the run, from plan, prices and delays.

Two tables hold the conditions, `FAST_CANNOT` and `KINDS_CANNOT`. A condition that holds rules an engine out, and its
text is the reason. If both are ruled out, all events of all ranks are simulated.

Only one condition needs times: whether operations of several lanes meet on a link. They are estimated by recurrences,
as if no transfer slowed down another. That is little work, and the estimate stops where operations meet.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias

from simdist.cost.costs import Costs, Shared, Varying
from simdist.engines.observers import ObservedT, Observer, WholeTrace
from simdist.errors import UnsupportedError
from simdist.plan import Enter, Op, Plan, op_text
from simdist.plan.delays import SeedDelays
from simdist.plan.walk import drops_late

if TYPE_CHECKING:
    from simdist.engines.alike import Courses
    from simdist.engines.contention import SharedLinks

Engine: TypeAlias = Literal["auto", "des", "fast"]
#: `alike` takes one rank of each kind, or refuses.
AnyEngine: TypeAlias = Engine | Literal["alike"]

USE_OTHERS = "use --engine des (or auto)"


@dataclass(frozen=True, slots=True)
class ChosenEngine:
    """The engine of a run.

    Args:
        engine: `fast`, `alike` or `des`.
        reason: Why no other.
    """

    engine: AnyEngine
    reason: str

    @property
    def text(self) -> str:
        """The engine and the reason."""
        name = {"alike": "des, one rank of each kind", "des": "des, all ranks"}.get(self.engine, self.engine)
        return f"{name}: {self.reason}"


@dataclass(frozen=True)
class RunToChoose(Generic[ObservedT]):
    """A run for which an engine is chosen.

    Args:
        plan: A legal plan.
        costs: Its price list, or one for each seed.
        delays: The delays of the seeds.
        observe: What is kept.
        needs_events: Whether there are actors, or observers of every event.
        known: What earlier runs with these prices found about ranks that are alike.
    """

    plan: Plan
    costs: Sequence[Costs]
    delays: SeedDelays
    observe: Observer[ObservedT]
    needs_events: bool
    known: "Courses | None" = None

    @cached_property
    def courses(self) -> "Courses":
        """What is known about ranks that are alike."""
        from simdist.engines.alike import Courses

        return self.known or Courses(self.costs[0], self.plan.world_size)

    @cached_property
    def has_several_prices(self) -> bool:
        """Whether seeds have different price lists."""
        return any(each is not self.costs[0] for each in self.costs)

    @cached_property
    def late_rows(self) -> Mapping[int, int]:
        """See `simdist.plan.walk.drops_late`."""
        return drops_late(self.plan)

    @cached_property
    def links(self) -> "SharedLinks | None":
        """The links that transfers may share; None without any."""
        if not any(each.contested for each in self.costs):
            return None
        from simdist.engines.contention import SharedLinks

        return SharedLinks(self.costs if self.has_several_prices else self.costs[:1], self.plan.world_size)

    def shared(self) -> list[tuple[Op, Shared]]:
        """Return the collectives and their prices."""
        return [(op, cost) for op, cost in self.costs[0].of.items() if isinstance(cost, Shared)]


@dataclass(frozen=True, slots=True)
class Condition:
    """What rules an engine out.

    Args:
        name: Its name.
        looks_at: What it looks at: `run`, `plan`, `prices` or `delays`.
        found: Returns the reason if the condition holds, else None.
    """

    name: str
    looks_at: str
    found: Callable[[RunToChoose[Any]], str | None]


def choose(run: RunToChoose[Any], engine: AnyEngine, barred: Mapping[str, str]) -> ChosenEngine:
    """Choose the engine of a run.

    Args:
        run: The run.
        engine: What the caller asks for; `auto` leaves the choice free.
        barred: Engines that are not to be taken, and why.

    Raises:
        UnsupportedError: The caller asked for an engine that cannot compute this exactly.
    """
    if engine == "des":
        return ChosenEngine("des", "asked for")
    order: Sequence[AnyEngine] = ("fast", "alike")
    if engine != "auto":
        order = (engine,)
    elif not run.needs_events and run.observe.prefers_kinds(run.plan, run.delays):
        order = ("alike", "fast")
    reasons: list[str] = []
    for name in order:
        reason = barred.get(name) or _reason_against(run, FAST_CANNOT if name == "fast" else KINDS_CANNOT)
        if reason is None:
            return ChosenEngine(name, _joined(reasons) or _settled(run, name))
        reasons.append(reason)
    if engine != "auto":
        raise UnsupportedError(f"{reasons[0]}: {USE_OTHERS}")
    return ChosenEngine("des", _joined(reasons))


def _joined(reasons: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))


def _settled(run: RunToChoose[Any], engine: AnyEngine) -> str:
    """Return why the first engine of the order is exact."""
    if engine == "alike":
        return "few ranks differ"
    return "transfers share links only with others of their lane" if run.links else "transfers share no links"


def all_ranks_are_alike(plan: Plan, costs: Costs) -> bool:
    """Tell whether all ranks surely have the same times, so that none waits for another."""
    from simdist.engines.vector import one_rank_stands_for_all

    run = RunToChoose(plan, [costs], SeedDelays.of({}), WholeTrace(), needs_events=False)
    before_times = FAST_CANNOT[:-1]
    is_fast = _reason_against(run, before_times) is None and not run.late_rows
    return is_fast and one_rank_stands_for_all(plan, costs, run.links)


def _reason_against(run: RunToChoose[Any], conditions: Sequence[Condition]) -> str | None:
    return next((reason for each in conditions if (reason := each.found(run)) is not None), None)


def _live(run: RunToChoose[Any]) -> str | None:
    return "actors and observers need every event" if run.needs_events else None


def _epochs(run: RunToChoose[Any]) -> str | None:
    return "epochs are read from the times of all ranks" if run.observe.needs_traces else None


def _varies(cost: object) -> bool:
    return isinstance(cost, Varying)


def _batches_differ(run: RunToChoose[Any]) -> str | None:
    op = next((op for op, cost in run.costs[0].of.items() if _varies(cost)), None)
    if op is None:
        return None
    return (
        f"{op_text(op)}: every batch takes its own time; the fast engine is exact only for operations that repeat "
        f"themselves"
    )


def _links_change(run: RunToChoose[Any]) -> str | None:
    for costs in run.costs[:1] if not run.has_several_prices else run.costs:
        for op, cost in costs.of.items():
            for transfer in cost.transfers if isinstance(cost, Shared) and costs.disturbed else ():
                used = {resource for stage in transfer.stages for resource in stage.resources.tolist()}
                for resource in sorted(used & costs.disturbed.keys()):
                    name = costs.resources.name(resource)
                    return (
                        f"{op_text(op)}: {name} is disturbed by {costs.disturbed[resource]}; the fast engine is exact "
                        f"only for links that stay as they are"
                    )
    return None


def _who_comes_first(run: RunToChoose[Any]) -> str | None:
    if not run.late_rows:
        return None
    if run.observe.held:
        return "links that are slow throughout hold up who comes first"
    if run.has_several_prices:
        return "who comes first depends on prices, which differ from seed to seed"
    op = next((op for op, cost in run.shared() if cost.first_come and run.links and op in run.links.uses), None)
    return f"{op_text(op)}: others may use its links" if op else None


def _members_apart(run: RunToChoose[Any]) -> str | None:
    op = next((op for op, cost in run.shared() if cost.segments and run.has_several_prices), None)
    return f"{op_text(op)}: members begin on their own, at prices that differ" if op else None


def _lanes_meet(run: RunToChoose[Any]) -> str | None:
    links = run.links
    if links is None or (links.is_certain and not run.late_rows):
        return None
    from simdist.engines.vector import VectorRun

    return VectorRun(run.plan, run.costs, run.delays, None, links).meeting()


def _sits_out(plan: Plan) -> bool:
    return any(isinstance(op, Enter) for body in plan.bodies for op in body)


def _some_sit_out(run: RunToChoose[Any]) -> str | None:
    return "ranks sit out steps" if run.late_rows or _sits_out(run.plan) else None


def _several_prices(run: RunToChoose[Any]) -> str | None:
    return "prices differ from seed to seed" if run.has_several_prices else None


def _links_differ(run: RunToChoose[Any]) -> str | None:
    costs = run.costs[0]
    return "links differ from others" if costs.disturbed or costs.shares else None


def _members_differ(run: RunToChoose[Any]) -> str | None:
    op = next((op for op, cost in run.shared() if cost.segments or cost.first_come), None)
    return f"{op_text(op)}: its members begin or end on their own" if op else None


def _most_ranks_differ(run: RunToChoose[Any]) -> str | None:
    return run.courses.too_many_kinds_at_first(run.plan, run.delays.different)


FAST_CANNOT = (
    Condition("every event is needed", "run", _live),
    Condition("batches differ", "prices", _batches_differ),
    Condition("links change", "prices", _links_change),
    Condition("who comes first", "plan", _who_comes_first),
    Condition("members on their own", "prices", _members_apart),
    Condition("lanes meet, or many transfers share links", "delays", _lanes_meet),
)
KINDS_CANNOT = (
    Condition("every event is needed", "run", _live),
    Condition("epochs", "run", _epochs),
    Condition("ranks sit out steps", "plan", _some_sit_out),
    Condition("several prices", "prices", _several_prices),
    Condition("links differ", "prices", _links_differ),
    Condition("batches differ", "prices", _batches_differ),
    Condition("members on their own", "prices", _members_differ),
    Condition("most ranks differ", "delays", _most_ranks_differ),
)
