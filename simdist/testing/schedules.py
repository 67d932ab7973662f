"""Rules for schedules."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from simdist import plan as plans
from simdist import scenario as scenarios
from simdist.errors import PlanError
from simdist.plan import COLLECTIVES, Backward, Delay, Forward, Op, Optimize, Plan, algorithms
from simdist.plan.check import check
from simdist.runs.building import build, job
from simdist.scenario import Scenario
from simdist.schedules import KINDS, Schedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.tuning import Allowance, Axis
from simdist.testing.jobs import CLUSTERS, engines_agree, scenario_of, telling
from simdist.tuning.candidates import Candidate, Extras, own_choices, permits, schedule_of

_SMALLEST_DENSITY = 0.01
_N_PASSES = 3
_PATHS: tuple[tuple[dict[str, object], int], ...] = (  # keys of a scenario, and micro-batches
    ({"input": {"source": "memory", "copy_method": "pageable"}, "host": {"run_ahead_steps": None}}, 3),
    ({"input": {"source": "storage", "prefetch": 1}, "host": {"run_ahead_steps": 3}}, 1),
    ({"host": {"waits_for": "update"}, "checkpoint": {"every": 3, "what": "parameters"}}, 2),
)


def check_schedule(schedule: Schedule | type[Schedule]) -> None:
    """Check a schedule against the rules for every schedule.

    On clusters of several shapes, its plan is legal and computes the declared `result`, and both engines simulate the
    same times. Scenarios and plans can be written to files and read back. `tune` can try the declared axes.

    Args:
        schedule: The schedule. For a class, each of its `examples` is checked.

    Raises:
        AssertionError: It breaks a rule. The message names the rule and the case.
    """
    if isinstance(schedule, type):
        for example in schedule.examples:
            with telling(f"{schedule.__name__}.examples, {example}"):
                found = schedule.model_validate(example)
            check_schedule(found)
        return
    with telling(schedule.name):
        _check_files(schedule)
        _check_steps(schedule)
        _check_search(type(schedule), schedule)
    for nodes, gpus_per_node in CLUSTERS:
        with telling(f"{schedule.name} on {nodes} nodes of {gpus_per_node} GPUs"):
            problems = schedule.problems(Shape(nodes * gpus_per_node, gpus_per_node))
            if (nodes, gpus_per_node) == CLUSTERS[0]:
                assert not problems, f"examples are legal on this cluster: {problems}"
            if not problems:
                _check_run(scenario_of(nodes, gpus_per_node), schedule)
    for path, micro_batches in _PATHS:
        with telling(f"{schedule.name} with {path}, micro_batches: {micro_batches}"):
            plain = scenario_of(changes=path)
            workload = plain.workload.model_copy(update={"micro_batches": micro_batches})
            scenario = plain.changed(workload=workload, schedules=(schedule,))
            _check_plan(build(scenario, schedule).plan, schedule, job(scenario))


def _check_run(plain: Scenario, schedule: Schedule) -> None:
    """Prove a plan, and simulate it with both engines."""
    scenario = plain.changed(schedules=(schedule,))
    built = build(scenario, schedule)
    described = job(scenario)
    _check_plan(built.plan, schedule, described)
    _check_cycle(built.plan, schedule, described)
    engines_agree(scenario, built)


def _check_plan(plan: Plan, schedule: Schedule, described: Job) -> None:
    assert (plan.name, plan.world_size, plan.n_steps) == (schedule.name, described.world_size, described.n_steps), (
        f"plan {plan.name} of {plan.world_size} ranks and {plan.n_steps} steps: it is that of the job"
    )
    again = plans.loads(plans.dumps(plan))
    assert again == plan, "the plan is not what is read back from JSON"


def _check_cycle(plan: Plan, schedule: Schedule, described: Job) -> None:
    cycle = schedule.cycle(described)
    bodies = list(plan.body_of_steps())
    for step in range(cycle.start, len(bodies) - len(cycle)):
        same = bodies[step] == bodies[step + len(cycle)]
        assert same, f"cycle says that steps {step} and {step + len(cycle)} are alike, and they are not"


def _check_steps(schedule: Schedule) -> None:
    """Check the training, waits and communication in every step of a plan of 8 ranks."""
    described = job(scenario_of())
    plan = schedule.plan(described)
    for number, step in enumerate(_steps(plan)):
        with telling(f"step {number}"):
            _check_step(step)
    passes = schedule.plan(replace(described, micro_batches=_N_PASSES))
    for number, step in enumerate(_steps(passes)):
        with telling(f"step {number} of {_N_PASSES} micro-batches"):
            _check_passes(step, is_sharded=_is_sharded(plan))
    shorter = schedule.plan(replace(described, n_steps=7))
    assert list(_steps(shorter)) == list(_steps(plan))[:7], "a plan of 7 steps is not how a longer one begins"
    quiet = schedule.plan(replace(described, delay_channels=frozenset()))
    assert not any(isinstance(op, Delay) for op in _ops(quiet)), "delays stand in a plan into which none are injected"
    for algorithm in algorithms.names():
        _check_algorithm(schedule, algorithm, described)


def _check_step(step: tuple[Op, ...]) -> None:
    n_updates = sum(isinstance(op, Optimize) and op.optimizer == "inner" for op in step)
    n_forward = sum(isinstance(op, Forward) for op in step)
    assert n_forward >= 1, "no forward pass"
    assert n_updates == 1, f"{n_updates} updates of parameters, not 1"
    channels = sorted(op.channel for op in step if isinstance(op, Delay))
    assert channels == ["compute", "host"], f"delays are injected on host and compute, and stand on {channels}"
    classes = [type(op) for op in step]
    is_between = classes.index(Forward) < step.index(Delay("host")) < classes.index(Backward)
    assert is_between, "the host's delay does not stand between the forward and the backward pass"


def _check_passes(step: tuple[Op, ...], *, is_sharded: bool) -> None:
    """Check that each micro-batch has its own delays and that, of a model that is not sharded, only the last sends."""
    for channel in ("compute", "host"):
        delays = [op.micro_batch for op in step if isinstance(op, Delay) and op.channel == channel]
        assert delays == [*range(_N_PASSES)], f"{channel} is delayed in micro-batches {delays}"
    places = [at for at, op in enumerate(step) if isinstance(op, Forward)]
    early = {type(op).__name__ for op in step[places[0] : places[-1]]} - {"Forward", "Backward", "Delay", "Wait"}
    assert not early or is_sharded, f"{', '.join(sorted(early))} before the last"


def _is_sharded(plan: Plan) -> bool:
    """Tell whether ranks hold slices of parameters, which they gather and reduce also in earlier micro-batches."""
    return any(buffer.sharded_over.size > 1 for buffer in plan.buffers)


def _check_algorithm(schedule: Schedule, algorithm: str, described: Job) -> None:
    chosen = schedule.model_copy(update={"algorithm": algorithm})
    if chosen.problems(described):
        return
    plan = chosen.plan(described)
    try:
        check(plan)
    except PlanError as error:
        raise AssertionError(f"problems() allows algorithm {algorithm}, and check does not: {error}") from None
    used = {op.algorithm for op in _ops(plan) if isinstance(op, COLLECTIVES)} - {"broadcasts"}  # see updates_sent_by
    if algorithm not in (algorithms.AUTO, "server"):  # which a schedule takes only where it has servers
        assert used <= {algorithm}, f"algorithm {algorithm} is chosen, and collectives take {sorted(used)}"


def _check_files(schedule: Schedule) -> None:
    """Write the schedule to a scenario, and read it back."""
    cls = type(schedule)
    kind = schedule.kind_in_files()
    assert KINDS.find(kind) is cls, f"kind {kind!r} in a scenario is another class"
    scenario = scenario_of().changed(schedules=(schedule,))
    (again,) = scenarios.loads(scenarios.dump(scenario)).schedules
    assert again == schedule, f"what is read back from YAML is {again!r}"
    described = job(scenario_of())
    renamed = schedule.model_copy(update={"label": "mine"}).plan(described)
    assert renamed.name == "mine", "the plan is not called as the label says"
    assert renamed.digest() == schedule.plan(described).digest(), "the digest of the plan depends on the label"
    ahead = schedule.model_copy(update={"run_ahead_steps": 3})
    expected = schedule.plan(replace(described, run_ahead_steps=3))
    assert ahead.plan(described).digest() == expected.digest(), "run_ahead_steps of the schedule has no effect"


def _check_search(cls: type[Schedule], schedule: Schedule) -> None:
    """Try the axes and permits that the class declares to `tune`."""
    scenario = scenario_of().changed(schedules=(schedule,))
    described = job(scenario)
    kind = schedule.kind_in_files()
    words = permits([kind])
    for axis in cls.axes(described, Allowance(frozenset(words), _SMALLEST_DENSITY)):
        _check_axis(cls, axis, set(words))
    extras = Extras(min_density=_SMALLEST_DENSITY, allow=tuple(words))
    choices = own_choices(kind, scenario, described, extras)
    labels: dict[str, Candidate] = {}
    for levels, values in product(_levels(cls), product(*(each.values for each in choices))):
        pairs = zip(choices, values, strict=True)
        candidate = Candidate(kind, levels, tuple((each.name, value) for each, value in pairs if value != each.default))
        if candidate.settings() is None:
            continue
        try:
            name = schedule_of(candidate).name
        except ValueError:  # not all settings go together
            continue
        other = labels.setdefault(name, candidate)
        assert other == candidate, f"tune calls two candidates {name!r}: {other} and {candidate}: write `label_of`"
    assert labels or not choices, "none of the values that axes declare is legal"


def _levels(cls: type[Schedule]) -> tuple[tuple[tuple[int, int], ...], ...]:
    return (((4, 8),), ((2, 4), (4, 8))) if cls.takes_levels else ((),)


def _check_axis(cls: type[Schedule], axis: Axis, words: set[str]) -> None:
    fields = ", ".join(cls.model_fields)
    assert axis.name in cls.model_fields, f"axis {axis.name!r} is none of the fields: {fields}"
    assert len(set(axis.values)) == len(axis.values) > 0, f"axis {axis.name} has the values {axis.values}"
    if axis.permit:
        assert axis.permit.word in words, f"axis {axis.name} asks for {axis.permit.word!r}: write it in `permits`"


def _steps(plan: Plan) -> Iterator[tuple[Op, ...]]:
    return (plan.bodies[number] for number in plan.body_of_steps())


def _ops(plan: Plan) -> Iterator[Op]:
    return (op for body in plan.bodies for op in body)
