"""Operations that are recorded once and replayed in every step, with a graph that a test pretends."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from pretended import CPU, GPU, Cuda  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from real.buffers.memory import Memory  # noqa: E402
from real.buffers.transforms import selecting_nbytes, selections, transform, warm_up_transforms  # noqa: E402
from real.kernels.graphs import Graphs  # noqa: E402
from real.kernels.topk import TopK  # noqa: E402
from simdist.errors import RunError  # noqa: E402
from simdist.plan import Buffer, Densify, Lane, Merge, Plan, Select  # noqa: E402


class PretendedGraph(TorchDispatchMode):
    """Records calls of torch, and performs them again on the same tensors. Like CUDA, it changes nothing meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.n_replays = 0
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self._made | self._before.keys():
                self._before[each.untyped_storage().data_ptr()] = each, each.clone()
        result = call(*args, **(kwargs or {}))
        made = {each.untyped_storage().data_ptr() for each in tree_leaves(result) if isinstance(each, Tensor)}
        self._made |= made - self._before.keys()
        self._calls.append((call, args, kwargs or {}, result))
        return result

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.shares = pool
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        for tensor, contents in self._before.values():
            tensor.copy_(contents)

    def pool(self) -> object:
        return self.shares or self

    def replay(self) -> None:
        self.n_replays += 1
        for call, args, kwargs, recorded in self._calls:
            result = call(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(result), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PretendedGraph]:
    """Return the graphs that are made while CUDA is pretended."""
    graphs: list[PretendedGraph] = []

    def graph() -> PretendedGraph:
        graphs.append(PretendedGraph())
        return graphs[-1]

    Cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return graphs


SELECT = Select("grad", "top", "residual", 4)
OPS = (SELECT, Merge("top", "kept", "residual", 2), Densify("kept", "sum", 2))
BUFFERS = (
    Buffer("grad", 40, initialized=True),
    Buffer("residual", 40, initialized=True),
    Buffer("top", 4, sparse=True),
    Buffer("kept", 3, sparse=True),
    Buffer("sum", 40),
)
PLAN = Plan.from_steps("one", world_size=1, buffers=BUFFERS, steps=[OPS])


def memory_of(plan: Plan, *, records: bool) -> Memory:
    memory = Memory(plan, CPU, {each.name for each in BUFFERS})
    memory.graphs = Graphs(CPU) if records else None
    return memory


def steps_of(plan: Plan, memory: Memory) -> list[Tensor]:
    """Perform a plan in a few steps; return what is in the buffers after each."""
    generator, found = torch.Generator().manual_seed(0), []
    warm_up_transforms(plan, memory)
    for step in range(3):
        memory.dense("grad").copy_(torch.randn(40, generator=generator))
        for op in plan.bodies[0]:
            transform(memory, op, step=step, rank=1)
        found.append(torch.cat([each for buffer in BUFFERS for each in memory.tensors(buffer.name)]))
    return found


def test_replayed_operations_leave_what_launched_ones_do(made: list[PretendedGraph]) -> None:
    launched = steps_of(PLAN, memory_of(PLAN, records=False))
    memory = memory_of(PLAN, records=True)
    replayed = steps_of(PLAN, memory)
    assert all(map(torch.equal, launched, replayed))
    assert not torch.equal(launched[0], launched[1])
    assert [graph.n_replays for graph in made] == [3, 3, 3]
    assert [graph.shares for graph in made] == [None, made[0], made[0]]
    assert selections(PLAN, memory) == {"top": "torch.topk, recorded"}


def test_what_cannot_be_recorded_is_launched(made: list[PretendedGraph]) -> None:
    op = replace(SELECT, method="mstopk")  # on a CPU, it waits for values
    plan = Plan.from_steps("one", world_size=1, buffers=BUFFERS, steps=[(op,)])
    memory = memory_of(plan, records=True)
    assert all(map(torch.equal, steps_of(plan, memory_of(plan, records=False)), steps_of(plan, memory)))
    assert memory.graphs is not None
    assert memory.graphs.refused == {op: "operation not permitted when stream is capturing"}
    assert selections(plan, memory) == {"top": "groups"}


def test_memory_at_another_address_has_no_graph(made: list[PretendedGraph]) -> None:
    memory = memory_of(PLAN, records=True)
    warm_up_transforms(PLAN, memory)
    moved, grad = torch.ones(40), memory.dense("grad")
    grad.set_(moved.untyped_storage(), 0, (40,))
    transform(memory, SELECT, step=0, rank=0)
    assert made[0].n_replays == 0
    assert memory.sparse("top").values.tolist() == [1.0] * 4


def test_a_replay_draws_the_number_of_its_step(made: list[PretendedGraph]) -> None:
    graphs, values, out = Graphs(CPU), torch.arange(4.0), torch.zeros(4)
    graphs.record("op", "lane", (values, out), lambda drawn: torch.mul(values, drawn, out=out))
    assert not out.any(), "recording performs nothing"
    for drawn in (0.25, 0.5):
        assert graphs.replay("op", (values, out), drawn)
        assert out.tolist() == (values * drawn).tolist()


def test_graphs_of_two_lanes_share_no_memory(made: list[PretendedGraph]) -> None:
    graphs, out = Graphs(CPU), torch.zeros(1)
    for number, lane in enumerate(("compute", "average", "compute")):
        graphs.record(number, lane, (out,), out.copy_)
    assert [graph.shares for graph in made] == [None, None, made[0]]


@pytest.mark.parametrize("method", ["exact", "mstopk", "dgc"])
def test_kernels_serve_long_vectors_on_a_gpu(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    monkeypatch.setattr("real.kernels.thresholds.importlib.util.find_spec", lambda name: name == "triton")
    long = TopK(1000, 10, method, torch.float32, GPU, kernels_from=1000)
    assert long.way == "kernels"
    assert replace(long, count=999).way == "torch.topk"
    assert replace(long, dtype=torch.float64).way == "torch.topk"
    assert replace(long, k=0).way == "trivial"
    assert replace(long, device=CPU).way == ("torch.topk" if method == "exact" else "groups")
    assert long.scratch_nbytes > 8 * 1000
    assert replace(long, count=999).scratch_nbytes == 4 * 999


def test_selections_of_a_lane_share_their_memory() -> None:
    ops = (SELECT, replace(SELECT, k=2), replace(SELECT, k=3, lane=Lane("other", "comm")))
    plan = Plan.from_steps("one", world_size=1, buffers=BUFFERS, steps=[ops])
    assert selecting_nbytes(plan, CPU, 1000) == 2 * 4 * 40
    with pytest.raises(RunError, match="for its buffers and beside them"):
        Memory(plan, CPU, (), scratch_nbytes=10**15)
