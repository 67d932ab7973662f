"""Traces: what is saved comes back, equal traces are equal bytes, other plans are refused."""

import dataclasses
import hashlib
import time

import numpy as np
import pytest
from engine_runs import des, fast

from simdist.cost import price
from simdist.errors import TraceError
from simdist.plan.text import op_name
from simdist.plan.walk import walk
from simdist.scenario.cluster import Cluster, Link
from simdist.scenario.workload import Tensor, Workload
from simdist.schedules import Job, kinds
from simdist.traces.trace import Trace

ARRAYS = ("ready_s", "start_s", "end_s")


def simulated(*, period=2, n_steps=5, seed=0, engine=fast):
    plan = kinds()["local_sgd"](period=period).plan(
        Job(4, 2, n_steps, tensor_counts=(250,), delay_channels=frozenset({"host"}))
    )
    line = Link(latency_s=1e-3, bandwidth_Bps=1e6)
    workload = Workload(tensors=(Tensor(name="w", count=250),), batch_size=1, forward_s=0.1, backward_s=0.2)
    costs = price(plan, Cluster(nodes=2, gpus_per_node=2, fabric=line, network=line), workload)
    return engine.simulate(plan, costs, {"host": np.random.default_rng(seed).random((1, n_steps, 4))})


def test_trace_comes_back_from_its_file(tmp_path):
    trace = simulated()
    trace.save(tmp_path / "trace.npz")
    loaded = Trace.load(tmp_path / "trace.npz")
    assert (loaded.plan, loaded.source) == (trace.plan, "simulated by fast")
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(trace, name))
        assert getattr(loaded, name).dtype == np.float64


def test_what_did_not_run_stays_nan_and_does_not_count(tmp_path):
    trace = simulated()
    for name in ARRAYS:
        getattr(trace, name)[-1, 2] = np.nan
    trace.save(tmp_path / "trace.npz")
    loaded = Trace.load(tmp_path / "trace.npz")
    assert np.argwhere(np.isnan(loaded.end_s)).tolist() == [[trace.plan.n_instances - 1, 2]]
    assert loaded.makespan_s == np.nanmax(trace.end_s)


def test_operation_that_was_broken_off_has_no_end(tmp_path):
    trace = simulated()
    trace.end_s[-1, 2] = trace.start_s[-2, 1] = trace.end_s[-2, 1] = np.nan
    trace.save(tmp_path / "trace.npz")
    np.testing.assert_array_equal(Trace.load(tmp_path / "trace.npz").end_s, trace.end_s)


def test_numpy_reads_the_file_without_simdist(tmp_path):
    trace = simulated()
    trace.save(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as arrays:
        assert set(arrays) == {"header", *ARRAYS}
        np.testing.assert_array_equal(arrays["end_s"], trace.end_s)


def test_equal_traces_are_equal_bytes_at_any_time_and_under_any_name(tmp_path, monkeypatch):
    simulated().save(tmp_path / "one.npz")
    simulated(seed=1).save(tmp_path / "other.npz")
    monkeypatch.setattr(time, "localtime", lambda *_: time.gmtime(1e9))
    simulated().save(tmp_path / "two.npz")
    hashes = [hashlib.sha256((tmp_path / f"{name}.npz").read_bytes()).digest() for name in ("one", "two", "other")]
    assert hashes[0] == hashes[1] != hashes[2]


def test_views_and_transposed_arrays_are_saved_like_copies(tmp_path):
    trace = simulated()
    turned = dataclasses.replace(
        trace, end_s=np.asfortranarray(trace.end_s), start_s=np.repeat(trace.start_s, 2, 1)[:, ::2]
    )
    trace.save(tmp_path / "one.npz")
    turned.save(tmp_path / "two.npz")
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


def test_traces_of_one_plan_are_compared_by_subtraction():
    late, early = simulated(seed=1), simulated(seed=2)
    np.testing.assert_array_equal(late.difference_s(early), late.end_s - early.end_s)
    assert (simulated().difference_s(simulated(engine=des)) == 0).all()


def test_name_of_a_plan_does_not_matter_in_a_comparison():
    trace = simulated()
    renamed = dataclasses.replace(trace, plan=dataclasses.replace(trace.plan, name="another"))
    assert (trace.difference_s(renamed) == 0).all()


@pytest.mark.parametrize("other", [{"period": 5}, {"n_steps": 6}])
def test_traces_of_different_plans_are_refused(other):
    with pytest.raises(TraceError, match=r"traces of different plans: local-2 \([0-9a-f]{12}\) and local-\d \("):
        simulated().difference_s(simulated(**other))


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("wrong", [lambda a: a[1:], lambda a: a.T, lambda a: a.astype(np.float32), np.ravel])
def test_arrays_that_do_not_fit_the_plan_are_refused(name, wrong):
    trace = simulated()
    with pytest.raises(
        TraceError, match=rf"{name} is float(32|64) \(.*; a trace of plan local-2 has float64 \(\d+, 4\)"
    ):
        dataclasses.replace(trace, **{name: wrong(trace.end_s)})


def damaged(path, kind):
    trace = simulated()
    match kind:
        case "missing":
            return
        case "text":
            path.write_text("not a trace")
        case "empty":
            path.write_bytes(b"")
        case "cut":
            trace.save(path)
            path.write_bytes(path.read_bytes()[:-1000])
        case "other arrays":
            np.savez(path, a=np.zeros(3))
        case "no json":
            np.savez(path, header=np.zeros(3, dtype=np.uint8), **{name: getattr(trace, name) for name in ARRAYS})
        case "other format":
            header = np.frombuffer(b'{"format": "simdist-trace-0"}', dtype=np.uint8)
            np.savez(path, header=header, **{name: getattr(trace, name) for name in ARRAYS})
        case "one array":
            path.write_bytes(b"\x93NUMPY\x01\x00" + bytes(200))


KINDS = ["missing", "text", "empty", "cut", "other arrays", "no json", "other format", "one array"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_no_trace_are_refused_by_name(kind, tmp_path):
    path = tmp_path / "trace.npz"
    damaged(path, kind)
    with pytest.raises(TraceError, match=r"trace\.npz: .*`simdist simulate -o RUN` writes one"):
        Trace.load(path)


def test_frame_has_a_row_per_instance_and_rank():
    trace = simulated()
    frame = trace.frame()
    assert list(frame.columns) == ["step", "position", "rank", "op", "stream", "ready_s", "start_s", "end_s"]
    assert len(frame) == trace.plan.n_instances * 4
    expected = [
        (instance.step, instance.position, rank, op_name(instance.op), instance.lane.stream)
        for instance in walk(trace.plan)
        for rank in range(4)
    ]
    assert list(frame[["step", "position", "rank", "op", "stream"]].itertuples(index=False, name=None)) == expected
    for name in ARRAYS:
        np.testing.assert_array_equal(frame[name].to_numpy(), getattr(trace, name).ravel())


def test_frame_answers_who_waits_for_whom():
    frame = simulated().frame()
    reduces = frame[frame.op == "all_reduce"]
    waits_s = (reduces.start_s - reduces.ready_s).groupby(reduces.step).min()
    assert list(waits_s.index) == [1, 3]
    assert (waits_s == 0).all()  # the last to arrive does not wait


@pytest.mark.parametrize(
    ("times_s", "said"),
    [
        ((3.0, 2.0, 4.0), "ready_s 3, start_s 2, end_s 4"),
        ((1.0, 3.0, 2.0), "ready_s 1, start_s 3, end_s 2"),
        ((1.0, 2.0, np.inf), "ready_s 1, start_s 2, end_s inf"),
        ((-np.inf, 2.0, 3.0), "ready_s -inf, start_s 2, end_s 3"),
        ((1.0, np.nan, 3.0), "ready_s 1, start_s nan, end_s 3"),
        ((np.nan, 1.0, 3.0), "ready_s nan, start_s 1, end_s 3"),
        ((np.inf, np.nan, np.nan), "ready_s inf, start_s nan, end_s nan"),
    ],
)
def test_times_that_no_run_has_are_refused_with_their_place(tmp_path, times_s, said):
    trace = simulated()
    instance = list(walk(trace.plan))[7]
    for name, seconds in zip(ARRAYS, times_s, strict=True):
        getattr(trace, name)[7, 2] = seconds
    trace.save(tmp_path / "trace.npz")
    with pytest.raises(TraceError) as refusal:
        Trace.load(tmp_path / "trace.npz")
    where = f"step {instance.step}, position {instance.position}, on rank 2 has {said}; times are finite"
    assert str(refusal.value).startswith(f"{tmp_path / 'trace.npz'}: {op_name(instance.op)} of {where}")
