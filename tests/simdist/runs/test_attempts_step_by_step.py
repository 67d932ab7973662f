"""Attempts on a short horizon, against a SimPy model that takes every step."""

import random
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field

import pytest
import simpy

from simdist.runs.attempts import Attempt, LongJob, attempts
from simdist.runs.checkpointed_steps import Checkpoints
from simdist.scenario.failure_sampling import Failure, failures_of
from simdist.scenario.failures import Failures

HORIZON_S = 3000.0


@dataclass
class File:
    step: int
    usable_s: float


@dataclass
class StepByStep:
    """A job on one replica whose ranks all start again after each failure."""

    failures: Failures
    job: LongJob
    seed: int
    env: simpy.Environment = field(default_factory=simpy.Environment)
    files: list[File] = field(default_factory=list)
    seen: list[Attempt] = field(default_factory=list)
    done: int = 0
    n_repeated: int = 0
    is_down: bool = True
    found: list[int] = field(default_factory=list)  # corruptions that were found while the job was down
    pending: dict[int, tuple[int, File | None]] = field(default_factory=dict)

    def run(self) -> None:
        job = self.env.process(self.lives())
        self.env.process(self.fails(job))
        self.env.run(HORIZON_S)

    def cause(self, failure: Failure):
        return self.failures.causes[failure.cause]

    def fails(self, job: simpy.Process) -> Iterator[simpy.Event]:
        for failure in failures_of(self.failures, seed=self.seed, n_nodes=4, gpus_per_node=2):
            yield self.env.timeout(failure.at_s - self.env.now)
            if self.cause(failure).effect != "corruption":
                job.interrupt(failure)
            elif not self.is_down:
                self.env.process(self.finds(job, failure))

    def finds(self, job: simpy.Process, failure: Failure) -> Iterator[simpy.Event]:
        usable = self.usable()
        self.pending[id(failure)] = (usable[-1].step if usable else 0, usable[-1] if usable else None)
        yield self.env.timeout(self.cause(failure).found_after_s)
        if id(failure) not in self.pending:
            return
        if self.is_down:
            self.found.append(id(failure))
            self.late = failure
        else:
            job.interrupt(failure)

    def usable(self) -> list[File]:
        return [each for each in self.files if each.usable_s <= self.env.now]

    def lives(self) -> Iterator[simpy.Event]:
        begin_s = 0.0
        failure: Failure | None = None
        while True:
            while True:
                try:
                    yield from self.recovers(failure)
                    break
                except simpy.Interrupt as interrupt:
                    failure = interrupt.cause
            self.is_down = False
            first_s = self.env.now
            first = self.done
            late = [each for each in self.found if each in self.pending]
            self.found.clear()
            try:
                if late:
                    raise simpy.Interrupt(self.late)
                yield from self.trains()
            except simpy.Interrupt as interrupt:
                failure = interrupt.cause
            self.is_down = True
            assert failure is not None
            end_s = self.env.now
            self.seen.append(Attempt(begin_s, first_s, end_s, first, self.done, self.cause(failure).cause))
            begin_s = end_s
            self.goes_back(failure)

    def goes_back(self, failure: Failure) -> None:
        usable = self.usable()
        resume = usable[-1].step if usable else 0
        if self.cause(failure).effect == "corruption":
            resume, clean = self.pending[id(failure)]
            keep = self.job.checkpoints.keep if self.job.checkpoints else None
            n_newer = len(usable) - (usable.index(clean) + 1 if clean else 0)
            if keep is not None and n_newer >= keep:
                resume = 0
        self.n_repeated += self.done - resume
        self.done = resume
        self.files = [each for each in usable if each.step <= resume]
        self.pending = {key: each for key, each in self.pending.items() if each[0] < resume}

    def recovers(self, failure: Failure | None) -> Iterator[simpy.Event]:
        recovery = self.failures.recovery
        if failure is not None:
            effect = self.cause(failure).effect
            if effect == "hang":
                yield self.env.timeout(self.failures.longest_timeout_s)
            elif effect != "corruption":
                yield self.env.timeout(recovery.detect_s)
            yield self.env.timeout(recovery.diagnose_s)
            if effect == "node":
                yield self.env.timeout(recovery.schedule_s)
        yield self.env.timeout(recovery.start_s)
        if self.done:
            yield self.env.timeout(recovery.load_s)

    def trains(self) -> Iterator[simpy.Event]:
        files = self.job.checkpoints
        while True:
            yield self.env.timeout(self.job.step_s)
            self.done += 1
            if files is None or self.done % files.every_steps:
                continue
            if self.files and self.files[-1].usable_s > self.env.now:
                yield self.env.timeout(self.files[-1].usable_s - self.env.now)
            yield self.env.timeout(files.stall_s)
            self.files.append(File(self.done, self.env.now + files.write_s))


def scenario(draw: random.Random) -> tuple[Failures, LongJob]:
    effects = [
        {"effect": "process", "of": "gpu"},
        {"effect": "node", "of": "node"},
        {"effect": "hang", "of": "job"},
        {"effect": "corruption", "of": "gpu", "found_after": f"{draw.uniform(20, 400)} s"},
    ]
    causes = [
        {"cause": each["effect"], "rate": f"1 per {draw.uniform(300, 9000)} s", **each} | {"of": "job"}
        for each in draw.sample(effects, draw.randint(1, 4))
    ]
    times = {key: f"{draw.uniform(0, 30)} s" for key in ("detect", "diagnose", "schedule", "start", "load")}
    recovery = {**times, "timeouts": {"collective": f"{draw.uniform(10, 60)} s"}}
    files = Checkpoints(
        draw.randint(1, 40),
        stall_s=draw.choice([0.0, 0.3, 2.0]),
        write_s=draw.choice([0.0, 3.1, 50.0]),
        keep=draw.choice([None, 1, 2, 5]),
    )
    job = LongJob(draw.uniform(0.5, 3.0), 4, 2, horizon_s=HORIZON_S, checkpoints=files if draw.random() < 0.9 else None)
    return Failures.model_validate({"causes": causes, "recovery": recovery}), job


@pytest.mark.parametrize("number", range(40))
def test_attempts_are_those_of_a_model_that_takes_every_step(number: int) -> None:
    failures, job = scenario(random.Random(number))
    model = StepByStep(failures, job, seed=number)
    model.run()
    seen: list[Attempt] = []
    found = attempts(failures, job, seed=number, observe=seen.append)
    if seen and seen[-1].cause is None:
        assert seen.pop().last_step == model.done
    assert found.n_repeated == model.n_repeated
    assert len(seen) == len(model.seen)
    for one, other in zip(seen, model.seen, strict=True):
        assert astuple(one)[:-1] == pytest.approx(astuple(other)[:-1], abs=1e-6)
        assert one.cause == other.cause
