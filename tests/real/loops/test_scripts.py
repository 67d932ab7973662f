"""Scripts of other tools, wrapped, compute what they do under DistributedDataParallel, or what a loop does by hand."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import user_scripts
from pool import Pool
from processes import run, start

import real
from real.loops.foreign import unwrapped
from real.loops.nodes import ranks_per_node_for
from real.processes.rendezvous import place
from simdist.errors import RunError, ScenarioError, UnsupportedError
from simdist.plan import AllReduce
from simdist.schedules import Sync

WAYS = {"sync": "ddp", "local": "local by hand", "diloco": "diloco by hand"}
ROUNDING = {"two_types": 1e-6, "bfloat16_with_float32": 0.02}  # of types of lower precision than float64


@pytest.mark.parametrize("script", user_scripts.SCRIPTS)
@pytest.mark.parametrize("way", WAYS)
def test_scripts_compute_what_they_did_before(four: Pool, script: str, way: str) -> None:
    wrapped = four.run(user_scripts.trained, script, way)
    expected = four.run(user_scripts.trained, script, WAYS[way])
    for rank in range(4):
        np.testing.assert_allclose(wrapped[rank], expected[rank], rtol=0, atol=ROUNDING.get(script, 1e-12))


@pytest.mark.parametrize("by_steps", [False, True])
@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("left_out", [{1: (2,), 4: (0, 3)}, {2: (0, 1, 2, 3), 3: (0, 1, 2, 3)}], ids=["some", "all"])
@pytest.mark.parametrize("schedule", ["sync", "local"])
def test_ranks_that_leave_out_a_batch_have_no_gradient_in_that_step(
    four: Pool, schedule: str, left_out: dict[int, tuple[int, ...]], how: str, by_steps: bool
) -> None:
    wrapped = four.run(user_scripts.leaving_out, how, schedule, left_out, by_steps)
    expected = four.run(user_scripts.leaving_out, "by hand", schedule, left_out, by_steps)
    for rank in range(4):
        np.testing.assert_allclose(wrapped[rank], expected[rank], rtol=0, atol=1e-12)


@pytest.mark.parametrize("left_out", [{1: (2,), 4: (0, 3)}, {2: (0, 1, 2, 3)}], ids=["some", "all"])
@pytest.mark.parametrize("schedule", ["sync", "local"])
def test_gradients_of_the_others_are_unscaled_on_a_rank_that_leaves_out_a_batch(
    four: Pool, schedule: str, left_out: dict[int, tuple[int, ...]]
) -> None:
    wrapped = four.run(user_scripts.leaving_out_scaled, schedule, left_out)
    expected = four.run(user_scripts.leaving_out, "by hand", schedule, left_out, False)
    for rank in range(4):
        np.testing.assert_allclose(wrapped[rank], expected[rank], rtol=0, atol=1e-12)


def test_an_update_is_left_out_after_the_backward_pass(four: Pool) -> None:
    left_out = {1: (2,), 4: (0, 3)}
    wrapped = four.run(user_scripts.leaving_out, "backward", "local", left_out, True)
    expected = four.run(user_scripts.leaving_out, "by hand", "local", left_out, True)
    for rank in range(4):
        np.testing.assert_allclose(wrapped[rank], expected[rank], rtol=0, atol=1e-12)


# --- other tools; tests/real/frameworks/ trains with them ---


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Forwards to another optimizer without being one itself, as that of Accelerate."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class LightningSGD(AcceleratedOptimizer):
    """A class that a tool makes of its own and the user's."""


class Stranger(torch.optim.Optimizer):
    """Another such class, of which nothing is known."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_optimizers_of_other_tools_are_unwrapped_or_refused_with_the_line_to_write() -> None:
    inner = torch.optim.SGD(user_scripts.mlp().parameters(), lr=0.1)
    assert unwrapped(AcceleratedOptimizer(LightningSGD(inner))) is inner
    with pytest.raises(UnsupportedError, match=r"write real\.wrap\(model, optimizer\.optimizer, schedule\), un"):
        unwrapped(Stranger(inner))
    with pytest.raises(UnsupportedError, match=r"NoneType is no torch\.optim\.Optimizer"):
        unwrapped(AcceleratedOptimizer(None))


def test_two_models_that_train_each_other_need_no_process_group_of_the_script(four: Pool) -> None:
    expected = four.run(user_scripts.trained, "gan", "local")
    for rank, ending in run(user_scripts.gan_alone, 4).items():
        assert float(ending.output) == pytest.approx(float(expected[rank].sum()), rel=0, abs=1e-12)


# --- models of several types ---


def test_each_tensor_is_averaged_in_its_own_type() -> None:
    module = user_scripts.Normalised(torch.bfloat16, torch.float32)
    for schedule in user_scripts.SCHEDULES.values():
        plan = real.plan_for(module, schedule, 4, n_steps=4, ranks_per_node=2)
        sent = [plan.buffer(op.buffer) for body in plan.bodies for op in body if isinstance(op, AllReduce)]
        assert {(each.tensors[0] < 4, each.dtype) for each in sent} == {(True, "float32"), (False, "bfloat16")}
        assert sum(each.count for each in plan.buffers if each.name.startswith("param")) == 207


# --- nodes, Slurm, signals ---


@pytest.mark.parametrize("how", ["by wrap", "own group"])
@pytest.mark.parametrize("schedule", ["sync", "local", "levels"])
def test_schedules_that_need_no_nodes_run_on_uneven_ones(schedule: str, how: str) -> None:
    uneven = run(user_scripts.on_uneven_nodes, 4, schedule, (1, 3), how)
    even = run(user_scripts.on_uneven_nodes, 4, schedule, (2, 2), how)
    assert float(uneven[0].output) != 0.0
    assert [ending.output for ending in uneven.values()] == [ending.output for ending in even.values()]


@pytest.mark.parametrize("schedule", ["intra", "worker", "torus"])
def test_schedules_that_need_nodes_say_how_they_differ(schedule: str) -> None:
    for ending in run(user_scripts.on_uneven_nodes, 4, schedule, (1, 3), "by wrap").values():
        assert "needs machines with equal numbers of ranks, and nodes have 1 and 3 ranks (node 0: 1)" in ending.output
        assert "launch=real.Launch(ranks_per_node=1)" in ending.output


def test_machines_that_contradict_each_other_are_named() -> None:
    for ending in run(user_scripts.on_uneven_nodes, 3, "sync", (1, 3), "by wrap").values():
        assert "LOCAL_WORLD_SIZE is 1, 3, 3 on ranks 0 to 2" in ending.output


def test_variables_of_slurm_are_named() -> None:
    with pytest.raises(RunError, match=r"export RANK=\$SLURM_PROCID WORLD_SIZE=\$SLURM_NTASKS LOCAL_RANK"):
        place({"SLURM_PROCID": "3"})
    with pytest.raises(ScenarioError, match=r"under srun, int\(os\.environ\['SLURM_NTASKS_PER_NODE'\]\)"):
        ranks_per_node_for(Sync(), 4, None, (), {"SLURM_PROCID": "3"})


@pytest.mark.parametrize(("schedule", "how"), [("sync", "before"), ("local", "before")])
def test_a_rank_that_leaves_out_a_batch_alone_is_named_with_its_step(schedule: str, how: str) -> None:
    message = (
        r"rank 2 called worker\.close\(\) before step 7 \(a rank that leaves out a batch calls worker\.skip\(\)\), "
        r"ranks 0, 1, 3 did not \(at steps? (6 to )?7\): all ranks do so before the same step"
    )
    for ending in run(user_scripts.leaves_a_batch_out, 4, schedule, how).values():
        assert re.search(message, ending.output), ending.output[-500:]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            {0: {4: "average"}, 1: {}},
            r"rank 0 called worker\.average\(\) before step 4, rank 1 did not \(at step [3-7]\): all ranks do so",
        ),
        (
            {0: {}, 1: {4: "average"}},
            r"rank 1 called worker\.average\(\) before step 4, rank 0 did not \(at step [3-7]\): all ranks do so",
        ),
        (
            {0: {4: "average"}, 1: {4: "close"}},
            r"rank 0 called worker\.average\(\) before step 4, rank 1 called worker\.close\(\) before step 4",
        ),
        (
            {0: {4: "average"}, 1: {5: "average"}},
            r"rank 0 called worker\.average\(\) before step 4, rank 1 "
            r"(did not \(at step 4\)|called worker\.average\(\) before step 5)",
        ),
        (
            {0: {4: "average with buffers"}, 1: {4: "average"}},
            r"rank 0 came to 'the average before step 4, of buffers', rank 1 came to 'updates that were left out'",
        ),
    ],
    ids=["one averages", "the other averages", "one closes", "at other steps", "with buffers"],
)
def test_ranks_that_make_different_calls_are_told_which(calls: dict[int, dict[int, str]], message: str) -> None:
    for ending in run(user_scripts.calls_differ, 2, calls).values():
        assert ending.code == 1
        assert re.search(message, ending.output), ending.output[-500:]


def test_a_rank_that_leaves_out_a_batch_after_its_forward_pass_is_told_how() -> None:
    for ending in run(user_scripts.leaves_a_batch_out, 4, "local", "after").values():
        assert "step 3: a second forward pass in training mode, between the forward and the backward" in ending.output
        assert "To leave a batch out, call worker.skip()" in ending.output
        assert "in `with worker.no_sync():`" in ending.output


def test_ranks_that_are_asked_to_end_keep_a_checkpoint_and_go_on_from_it(tmp_path: Path) -> None:
    with start(user_scripts.ends_on_sigterm, 3, tmp_path / "kept", 1000) as ranks:
        ranks.until("is at step 5")
        ranks.signal(1, signal.SIGTERM)  # one is enough
        endings = ranks.wait()
    assert {ending.code for ending in endings.values()} == {0}
    (reached,) = {ending.output.splitlines()[2].removeprefix("ends at ") for ending in endings.values()}
    assert 5 < int(reached) < 1000
    last = int(reached) + 3
    resumed = run(user_scripts.ends_on_sigterm, 3, tmp_path / "kept", last)
    undisturbed = run(user_scripts.ends_on_sigterm, 3, tmp_path / "other", last)
    for rank in range(3):
        assert resumed[rank].output.splitlines()[0] == f"begins at {reached}"
        assert resumed[rank].output.splitlines()[-1] == undisturbed[rank].output.splitlines()[-1]
