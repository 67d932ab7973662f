"""Memory of buffers on a GPU whose host runs ahead: streams, events and the allocator are pretended."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
from pretended import PooledMemory
from sharded import plan_of

from real.execution.lifetimes import Lifetimes
from simdist.plan import Instance, Plan
from simdist.plan.liveness import uses
from simdist.plan.walk import walk
from simdist.runs.building import build
from simdist.runs.memory import memory_of
from simdist.scenario import loads
from simdist.schedules import FSDP, HSDP
from simdist.schedules.sharded import ShardedSchedule
from simdist.traces.memory import occupancy

SCHEDULES: dict[str, ShardedSchedule] = {
    "fsdp": FSDP(),
    "kept": FSDP(reshard_after_forward=False),
    "gathered among two": FSDP(reshard_after_forward=2),
    "ahead": FSDP(forward_prefetch=2, backward_prefetch=2, reduce_buffers=2),
    "two communicators": FSDP(communicators=2),
    "blocking": FSDP(blocking=True),
    "hsdp": HSDP(shard=2, all_reduce="last"),
    "local averages": HSDP(shard=2, between="local-2"),
}


class Gpu:
    """Streams that run what a host enqueues, each operation for a random while. The host waits where the plan says.

    Attributes:
        lives: What is tested.
        start_s, end_s: Times of every instance.
        uses: Block -> the uses of it in the order of the host, each as the buffer and the number of the instance.
    """

    def __init__(self, plan: Plan, seed: int, *, waits_early: bool = True, sees_order: bool = True) -> None:
        self.start_s = np.zeros(plan.n_instances)
        self.end_s = np.zeros(plan.n_instances)
        self.uses: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        self._stream = "compute"
        self.memory = PooledMemory(plan, lambda: self._stream)
        self.lives = Lifetimes(plan, self.memory, self._let_wait if waits_early else lambda *_: False)
        self._free_at_s: defaultdict[str, float] = defaultdict(float)
        random = np.random.default_rng(seed)
        slowness = {lane.stream: random.choice([0.01, 1.0, 100.0]) for lane in plan.lanes}
        bodies = list(plan.body_of_steps())
        self.lives.start()
        for instance in walk(plan):
            self._enqueue(instance, bodies[instance.step], random.random() * slowness[instance.lane.stream], sees_order)
        self.lives.finish()

    def _enqueue(self, instance: Instance, body: int, took_s: float, sees_order: bool) -> None:
        stream = self._stream = instance.lane.stream
        by_host = instance.lane.kind == "host"
        streams = ("host",) if by_host else ("host", stream)
        start_s = max(*self.end_s[list(instance.after)], *(self._free_at_s[each] for each in streams), 0.0)
        self.start_s[instance.index] = start_s
        self.lives.begin(instance, body)
        for name, _ in uses(instance.op):
            if name in self.memory.blocks:
                self.uses[self.memory.blocks[name]].append((name, instance.index))
        self.end_s[instance.index] = self._free_at_s[stream] = start_s if by_host else start_s + took_s
        self.lives.end(instance, body, has_run=by_host or not sees_order)

    def _let_wait(self, stream: str, instances: Mapping[str, int]) -> bool:
        self._free_at_s[stream] = max(self._free_at_s[stream], *self.end_s[list(instances.values())])
        return True

    def clashes(self) -> set[tuple[str, str]]:
        """Return pairs of buffers of which the second used a block before the first was through with it."""
        return {
            (before, name)
            for used in self.uses.values()
            for number, (name, index) in enumerate(used)
            for before, earlier in used[:number]
            if before != name and self.end_s[earlier] > self.start_s[index]
        }


each_schedule = pytest.mark.parametrize("name", SCHEDULES)


def plan_on_gpu(name: str) -> Plan:
    return plan_of(SCHEDULES[name], 4, micro_batches=2, n_steps=3)


@each_schedule
def test_no_memory_serves_two_buffers_at_a_time(name: str) -> None:
    plan = plan_on_gpu(name)
    for seed in range(5):
        gpu = Gpu(plan, seed)
        assert gpu.clashes() == set()
        assert max(map(len, gpu.uses.values())) > 2, "no memory was used again"
        assert gpu.memory.held_nbytes == sum(buffer.nbytes for buffer in plan.buffers if buffer.initialized)


def test_memory_that_does_not_wait_for_other_streams_would_serve_two_buffers_at_a_time() -> None:
    assert any(Gpu(plan_on_gpu("fsdp"), seed, sees_order=False).clashes() for seed in range(5))


@each_schedule
def test_giving_memory_back_delays_no_operation(name: str) -> None:
    plan = plan_on_gpu(name)
    for seed in range(3):
        early, late = Gpu(plan, seed), Gpu(plan, seed, waits_early=False)
        assert (early.start_s == late.start_s).all()
        assert early.lives.peak_nbytes <= late.lives.peak_nbytes


@each_schedule
def test_the_most_bytes_are_those_of_the_plan_and_of_reductions(name: str) -> None:
    """Computation notices late that a reduction is done. And the plan counts slices within what is gathered of them."""
    plan = plan_on_gpu(name)
    nbytes = {buffer.name: buffer.nbytes for buffer in plan.buffers}
    runs = [Gpu(plan, seed) for seed in range(5)]
    of_plan = max(occupancy(plan, each.start_s, each.end_s).peak_nbytes for each in runs)
    for each in runs:
        assert of_plan <= each.lives.peak_nbytes <= of_plan + 2 * (nbytes["ready.0"] + nbytes["reduced.0"])


SCENARIO = """
cluster: {preset: dgx-h100}
workload: {preset: gpt2-medium, batch_size: 1}
schedules:
  - {kind: fsdp}
  - {kind: fsdp, reshard_after_forward: false}
  - {kind: hsdp, shard: 4}
steps: 3
"""


@pytest.mark.parametrize("number", range(3), ids=["fsdp", "kept", "hsdp"])
def test_gpt2_medium_needs_the_memory_of_its_plan(number: int) -> None:
    scenario = loads(SCENARIO)
    built = build(scenario, scenario.schedules[number])
    column = memory_of(scenario, built)
    gpu = Gpu(built.plan, 0)
    state_nbytes = sum(buffer.nbytes for buffer in built.plan.buffers if buffer.name.startswith("param"))  # momentum
    assert gpu.lives.peak_nbytes + state_nbytes == pytest.approx(column.peak_nbytes, rel=0.05)
    assert gpu.clashes() == set()
