"""Backup workers and unequal inner steps over gloo: who is late, and that values are those of the virtual world."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_runs import simulate
from pool import Pool
from timeouts import TIMEOUT_S
from trainings import Training, by_arrival, by_plan, comes_alone, in_virtual_world, loss

from real.collectives.first_come import ArrivalClient, ArrivalServer
from real.collectives.worlds import check_performable
from real.execution import virtual
from real.loops.plans import check_shape
from simdist.errors import RunError, UnsupportedError
from simdist.plan import Plan, Servers
from simdist.plan.walk import drops_late
from simdist.runs.building import build, delays
from simdist.scenario import loads
from simdist.schedules import LocalSGD, Schedule, Sync
from simdist.schedules.backup_workers import BackupWorkers

N = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(N)
    yield made
    made.close()


def plan_of(schedule: Schedule, training: Training, n_steps: int = 12) -> Plan:
    return schedule.plan(training.job(N, n_steps))


@pytest.mark.parametrize("model", ["mlp", "dropout"])
@pytest.mark.parametrize(("backup", "servers"), [(1, "node"), (2, 1), (2, "world")])
def test_values_are_those_of_the_virtual_world_with_the_ranks_that_were_late(
    pool: Pool, model: str, backup: int, servers: int | str
) -> None:
    training = Training(model=model, micro_batches=2)
    plan = plan_of(BackupWorkers(backup=backup, servers=servers), training)
    results = pool.run(by_arrival, plan, training, {2: range(12), 1: range(3, 5)}, 0.05)
    late = results[0][1]
    assert [len(late[row]) for row in drops_late(plan)] == [backup] * 12
    again = virtual.train_together(plan, training.make, loss, training.batch, late=late)
    for rank, (parameters, _) in enumerate(results):
        np.testing.assert_array_equal(parameters, again.parameters[rank])
        np.testing.assert_array_equal(parameters, results[0][0])


def test_a_straggler_is_dropped_in_exactly_its_steps(pool: Pool) -> None:
    """It sleeps in steps 4 and 9 only, longer than any other takes; two steps later all come together again."""
    training = Training()
    plan = plan_of(BackupWorkers(backup=1), training)
    _, late = pool.run(by_arrival, plan, training, {0: (), 1: (4,), 2: (), 3: (9,)}, 0.3, 0.05)[0]
    found = [late[row] for row in drops_late(plan)]
    assert (found[4], found[9]) == ((1,), (3,))
    assert [late.get(entering, ()) for entering in drops_late(plan).values()][5] == (1,)


def test_all_reduce_among_the_first_is_refused_before_anything_runs() -> None:
    plan = plan_of(BackupWorkers(backup=1, algorithm="ring"), Training())
    with pytest.raises(
        RunError, match=r"without the last 1.* which can be simulated only: .* let ranks come to servers"
    ):
        check_performable(plan)
    check_performable(plan_of(BackupWorkers(backup=1), Training()))


def test_without_backup_values_are_those_of_synchronous_sgd(pool: Pool) -> None:
    training = Training()
    one, other = (
        pool.run(by_plan, plan_of(each, training), training)
        for each in (BackupWorkers(backup=0), Sync(bucket_nbytes=None))
    )
    for (parameters, losses), (expected, expected_losses) in zip(one, other, strict=True):
        np.testing.assert_array_equal(parameters, expected)
        np.testing.assert_array_equal(losses, expected_losses)


@pytest.mark.parametrize("servers", [Servers((3,), (0,)), Servers((2, 1, 0), (0, 2, 3))])
def test_who_is_missing_is_named(pool: Pool, servers: Servers) -> None:
    found = pool.run(comes_alone, (1, 2), 3, 0.5, servers)
    assert found[1] == found[2] == "ranks 0, 3 have not come within 0.5 s, and 1 of them must"


def test_of_ranks_that_leave_the_first_is_named_at_once() -> None:
    server = ArrivalServer("127.0.0.1", b"key", N, 4 * TIMEOUT_S)
    clients = [ArrivalClient({0: server.address}, b"key", rank, N, 4 * TIMEOUT_S) for rank in range(N)]
    for rank in (2, 1):
        clients[rank]._connections[0].close()
        time.sleep(0.2)
    begin_s = time.monotonic()
    with pytest.raises(RunError, match=r"^3 of 4 ranks must come, but first rank 2, then rank 1 left$"):
        clients[0].sum_of_first(torch.ones(3), 1, Servers((3,), members=(0,)))
    assert time.monotonic() - begin_s < TIMEOUT_S
    for client in clients:
        client._connections[0].close()
    time.sleep(0.2)


def test_values_and_times_of_a_simulated_run_belong_together() -> None:
    training = Training(dtype=torch.float32)
    counts = training.job(N, 10).tensor_counts
    tensors = ", ".join(f"{{name: t{number}, count: {count}}}" for number, count in enumerate(counts))
    scenario = loads(f"""
        cluster: {{nodes: 4, gpus_per_node: 1, fabric: ideal, network: ideal}}
        workload: {{tensors: [{tensors}], batch_size: 5, forward: 1 s, backward: 1 s}}
        disturbances: [{{kind: transient, on: compute, probability: 0.3, delay: 3 s}}]
        schedules: [{{kind: backup_workers, backup: 1}}]
        steps: 10
    """)
    built = build(scenario, scenario.schedules[0])
    trace = simulate(built.plan, built.costs, delays(scenario))
    found = virtual.train_together(built.plan, training.make, loss, training.batch, late=trace.late)
    assert (found.parameters == found.parameters[0]).all()
    assert {rank for ranks in trace.late.values() for rank in ranks} == {*range(N)}
    with pytest.raises(RunError, match=r"drops the late, and nothing says who is late at operation 5: give the `late`"):
        virtual.train_together(built.plan, training.make, loss, training.batch)


def test_unequal_inner_steps_train_as_in_the_virtual_world(pool: Pool) -> None:
    training = Training(model="dropout", micro_batches=2)
    plan = plan_of(LocalSGD(period=4, warmup_steps=1, inner_steps={1: 2, 3: 1}), training, 11)
    theirs = np.stack([parameters for parameters, _ in pool.run(by_plan, plan, training)])
    np.testing.assert_allclose(theirs, in_virtual_world(plan, training)[0], rtol=1e-12, atol=1e-13)


def test_a_loop_cannot_drop_the_late() -> None:
    with pytest.raises(UnsupportedError, match=r"it drops the late, .* in a loop, LocalSGD"):
        check_shape(plan_of(BackupWorkers(backup=1), Training()))
