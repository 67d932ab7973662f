"""Traces of the PyTorch profiler as a simulated job with a sharded model would leave them, one for each rank.

The host launches all work of a step shortly before its device begins with it, in the order of the plan. Kernels run
when the simulator says. A gather or reduce-scatter begins on a rank when that rank is ready for it.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine_runs import simulate
from kineto_drawing import AUTOGRAD, MAIN, Drawing

from simdist.plan import Body, ops
from simdist.plan.walk import walk
from simdist.runs.building import build, delays
from simdist.scenario import Scenario
from simdist.schedules.sharded import COPY_IN, ShardedSchedule
from simdist.traces.trace import Trace

_LAUNCH_MS = 1e-4
_STREAMS = {"compute": 7, "copy in": 9, "sum": 11, "comm": 20, "reduce": 21, "regather": 22, "replicate": 23}
_KERNELS = {
    ops.AllGather: ("_allgather_base", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    ops.ReduceScatter: ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL()"),
    ops.AllReduce: ("allreduce", "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"),
}
_TYPES = {"float32": "Float", "bfloat16": "BFloat16", "float16": "Half", "float64": "Double"}


@dataclass(frozen=True)
class Told:
    """What the profiler tells of a job.

    Attributes:
        units: Annotations name units.
        copies: Operators copy units out of what was gathered.
        groups: Names and ranks of process groups.
        sizes: Numbers of ranks that take part.
    """

    units: bool = True
    copies: bool = True
    groups: bool = True
    sizes: bool = True


def traced(scenario: Scenario) -> tuple[Trace, ShardedSchedule]:
    """Return the simulated trace of the first schedule of a scenario, which shards the model."""
    (schedule, *_) = scenario.schedules
    assert isinstance(schedule, ShardedSchedule)
    built = build(scenario, schedule)
    return simulate(built.plan, built.costs, delays(scenario)), schedule


def write_traces(folder: Path, scenario: Scenario, told: Told = Told()) -> Trace:
    """Write a trace for each rank; return the simulated one."""
    trace, _ = traced(scenario)
    for rank in range(trace.plan.world_size):
        writer = _Writer(trace, scenario, rank, told)
        writer.write()
        text = json.dumps(writer.drawing.header | {"traceEvents": writer.drawing.events})
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text.encode(), 1))
    return trace


def _header(scenario: Scenario, rank: int) -> dict[str, object]:
    cluster = scenario.cluster
    return {
        "deviceProperties": [{"id": n, "name": "NVIDIA H100"} for n in range(cluster.gpus_per_node)],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": cluster.world_size},
        "host_name": f"node{rank // cluster.gpus_per_node}",
    }


@dataclass
class _Writer:
    trace: Trace
    scenario: Scenario
    rank: int
    told: Told
    drawing: Drawing = field(init=False)
    host_ms: float = 0.0
    thread: int = MAIN
    is_late: bool = False

    def __post_init__(self) -> None:
        self.drawing = Drawing(_header(self.scenario, self.rank))
        self.buffers = {buffer.name: buffer for buffer in self.trace.plan.buffers}

    def write(self) -> None:
        steps: Mapping[int, list[tuple[int, ops.Op]]] = defaultdict(list)
        for each in walk(self.trace.plan):
            steps[each.step].append((each.index, each.op))
        ends_ms = [0.0]
        for number, instances in steps.items():
            ends_ms.append(max([ends_ms[-1], *(self._end_ms(index) for index, op in instances if _is_work(op))]))
            self._step(number, instances, ends_ms[-2])

    def _step(self, number: int, instances: list[tuple[int, ops.Op]], begin_ms: float) -> None:
        host = self.scenario.host
        self.host_ms = begin_ms - 400 * _LAUNCH_MS
        marked_ms = self.host_ms
        for (index, op), place in zip(instances, _places([op for _, op in instances]), strict=True):
            thread = MAIN if place == "forward" else AUTOGRAD
            self.host_ms += 0.0 if thread == self.thread else 2 * _LAUNCH_MS
            self.thread = thread
            self.is_late = place == "callback"
            match op:
                case ops.Wait(lane=lane) if lane.kind == "host" and host.waits_for == "loss":
                    self._sync(max(self.host_ms, self._end_ms(index)) - 2e-3)
                case ops.Wait() | ops.Delay(channel="host"):
                    pass
                case ops.Delay():
                    self._kernel("spin_kernel", index, _STREAMS["compute"])
                case ops.Forward():
                    self._forward(index)
                case ops.Backward():
                    self._backward(index)
                case ops.AllGather() | ops.ReduceScatter() | ops.AllReduce():
                    self._collective(index, op)
                case ops.Copy() | ops.Combine():
                    self._copy(index, op)
                case ops.Optimize():
                    self._optimize(index)
                case _:
                    raise NotImplementedError(op)
        if host.waits_for == "update" and host.run_ahead_steps is not None:
            self._sync(max(self._end_ms(index) for index, op in instances if _is_work(op)))
        self.drawing.note(f"ProfilerStep#{number}", marked_ms, self.host_ms + _LAUNCH_MS)

    def _sync(self, until_ms: float) -> None:
        until_ms = max(until_ms, self.host_ms)
        self.drawing.call("cudaStreamSynchronize", self.host_ms, until_ms)
        self.host_ms = until_ms + _LAUNCH_MS

    def _forward(self, index: int) -> None:
        begin_ms = self.host_ms
        self._kernel("sgemm_forward", index, _STREAMS["compute"])
        self.drawing.op("aten::linear", begin_ms, self.host_ms)

    def _backward(self, index: int) -> None:
        begin_ms = self.host_ms
        self._kernel("sgemm_backward", index, _STREAMS["compute"])
        self.drawing.node("MmBackward0", begin_ms, self.host_ms, tid=AUTOGRAD)

    def _optimize(self, index: int) -> None:
        self.thread = MAIN
        self.host_ms += _LAUNCH_MS
        begin_ms = self.host_ms
        self._kernel("multi_tensor_apply_kernel", index, _STREAMS["compute"])
        self.drawing.note("Optimizer.step#AdamW.step", begin_ms, self.host_ms)

    def _copy(self, index: int, op: ops.Copy | ops.Combine) -> None:
        begin_ms = self.host_ms
        unit = op.dst.partition(".")[2]
        name = "aten::copy_"
        where = "post_backward_reduce"
        if isinstance(op, ops.Copy) and op.lane == COPY_IN:
            name = "fsdp::all_gather_copy_in"
            where = "all_gather"
        elif isinstance(op, ops.Copy) and op.dst.startswith("unit."):
            name = "fsdp::split_with_sizes_copy" if self.told.copies else "triton_copy"
            where = "all_gather_copy_out"
        elif isinstance(op, ops.Copy) and op.dst.startswith("ready."):
            name = "fsdp::chunk_cat" if self.told.copies else "triton_cat"
        elif isinstance(op, ops.Copy) and op.dst.startswith("kept."):
            where = "post_forward"
        self._kernel(name.replace("::", "_"), index, _STREAMS[op.lane.name])
        self._in_pass(name, begin_ms)
        self._annotate(where, unit, begin_ms)

    def _collective(self, index: int, op: ops.AllGather | ops.ReduceScatter | ops.AllReduce) -> None:
        begin_ms = self.host_ms
        kind, kernel = _KERNELS[type(op)]
        source, target = (op.src, op.dst) if not isinstance(op, ops.AllReduce) else (op.buffer, op.buffer)
        sent, received = self.buffers[source], self.buffers[target]
        args: dict[str, object] = {
            "Collective_name": kind,
            "In_msg_nelems": sent.count,
            "Out_msg_nelems": received.count,
            "dtype": _TYPES[sent.dtype],
        }
        if self.told.sizes:
            args["Group_size"] = op.group.size
        if self.told.groups:
            (members,) = (each for each in op.group.members(self.trace.plan.world_size) if self.rank in each)
            args |= {"Process_Group_Ranks": str(list(members)), "Process_Group_Name": op.lane.communicator}
        start_ms, end_ms = (1e3 * float(times[index, self.rank]) for times in (self.trace.ready_s, self.trace.end_s))
        launch_ms = min(self.host_ms, start_ms)
        stream = _STREAMS[op.lane.name]
        self.drawing.gpu(kernel, launch_ms, start_ms, end_ms, tid=self.thread, stream=stream, **args)
        self.host_ms += 2 * _LAUNCH_MS
        self.drawing.op(f"c10d::{kind}_", begin_ms, self.host_ms, tid=self.thread)
        unit = source.partition(".")[2]
        self._annotate("all_gather" if isinstance(op, ops.AllGather) else "post_backward_reduce", unit, begin_ms)
        self._node(begin_ms)

    def _annotate(self, what: str, unit: str, begin_ms: float) -> None:
        if not self.told.units:
            return
        name = self.scenario.workload.sharded_units[int(unit)]
        tensor = self.scenario.workload.tensor_names[name.first]
        called = "" if tensor.startswith("root") else f" ({tensor.rpartition('.')[0]})"
        self.drawing.note(
            f"FSDP::{what}{called}", begin_ms - _LAUNCH_MS / 4, self.host_ms + _LAUNCH_MS / 4, tid=self.thread
        )
        self.host_ms += _LAUNCH_MS

    def _in_pass(self, name: str, begin_ms: float) -> None:
        self.drawing.op(name, begin_ms, self.host_ms, tid=self.thread)
        self._node(begin_ms)

    def _node(self, begin_ms: float) -> None:
        """Draw a node around what a backward pass does, or the callback at its end."""
        if self.thread == AUTOGRAD and not self.is_late:
            self.drawing.node("AddBackward0", begin_ms, self.host_ms, tid=AUTOGRAD)
        elif self.thread == AUTOGRAD and self.told.units:
            self.drawing.note("FSDP::root_post_backward_callback", begin_ms, self.host_ms, tid=AUTOGRAD)

    def _kernel(self, name: str, index: int, stream: int) -> None:
        start_ms, end_ms = (1e3 * float(times[index, self.rank]) for times in (self.trace.start_s, self.trace.end_s))
        if end_ms > start_ms:
            self.drawing.gpu(name, min(self.host_ms, start_ms), start_ms, end_ms, tid=self.thread, stream=stream)
        self.host_ms += 2 * _LAUNCH_MS

    def _end_ms(self, index: int) -> float:
        return 1e3 * float(self.trace.end_s[index, self.rank])


def _places(step: Sequence[ops.Op]) -> list[str]:
    """Return where the host is at each operation of a step: in a forward or backward pass, or in the callback after."""
    computing = [place for place, op in enumerate(step) if isinstance(op, ops.Forward | ops.Backward)]
    is_last = {
        one
        for one, other in zip(computing, [*computing[1:], None], strict=True)
        if other is None or type(step[one]) is not type(step[other])
    }
    places = []
    place = "forward"
    for at, op in enumerate(step):
        keeps = isinstance(op, ops.Copy) and op.dst.startswith("kept.")
        upcoming = next((type(step[each]) for each in computing if each >= at), ops.Optimize)
        if isinstance(op, ops.Forward):
            place = "forward"
        elif upcoming is ops.Backward and place == "forward" and not keeps and not isinstance(op, ops.Wait):
            place = "backward"
        elif (
            place == "callback"
            and upcoming is ops.Forward
            and (isinstance(op, ops.Delay) or (isinstance(op, ops.Copy | ops.AllGather) and _prepares(op)))
        ):
            place = "forward"
        places.append(place)
        if at in is_last and isinstance(op, ops.Backward):
            place = "callback"
    return places


def _prepares(op: ops.Copy | ops.AllGather) -> bool:
    return op.dst.startswith(("slice.", "gathered.", "unit."))


def _is_work(op: ops.Op) -> bool:
    return not isinstance(op, ops.Wait)


def without_delays(body: Body) -> Body:
    """Return a body of a plan without the places where delays are played."""
    return tuple(op for op in body if not isinstance(op, ops.Delay))


def step_s(trace: Trace) -> float:
    """Return the mean seconds of a step."""
    return trace.makespan_s / trace.plan.n_steps
