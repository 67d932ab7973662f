"""`fully_shard` in gloo processes: the values after training, its collectives, and the bytes that each rank sends."""

from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from fsdp_checked import unless_checked
from fsdp_rules import rows_by_rules
from fsdp_settings import (
    ALL_REDUCE,
    BACKWARD_GATHER,
    GATHER,
    REDUCE_SCATTER,
    ROOT,
    MicroBatch,
    Passes,
    Root,
    Settings,
    Unit,
)
from pool import Pool
from torch import nn
from trainings import Training

if torch.__version__ < "2.13":
    pytest.skip(
        "the collectives of fully_shard have the names that are recorded from torch 2.13 on", allow_module_level=True
    )

from fsdp_trainings import (
    Sharded,
    Transfer,
    by_fully_shard,
    by_one_process,
    padded_count,
    sent_nbytes,
    units_of,
)

pytestmark = unless_checked()
N_STEPS = 20
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}  # of the largest parameter
BF16 = torch.bfloat16
NO_SYNC = MicroBatch(reduces=False)
NO_ALL_REDUCE = MicroBatch(all_reduces=False)
NO_RESHARD = MicroBatch(reshards=False)
LAST = MicroBatch()
PLAIN = {
    "4": Sharded((4,)),
    "2 x 2": Sharded((2, 2)),
    "2 x 4": Sharded((2, 4)),
    "one replica": Sharded((1, 4)),
    "one rank in a shard": Sharded((4, 1)),
    "kept after the forward pass": Sharded((4,), reshard_after_forward=False),
    "in 2 parts after the forward pass": Sharded((4,), reshard_after_forward=2),
    "the root, too": Sharded((4,), root_children=(6,), reshard_after_forward=True),
    "a root that is used last": Sharded((2, 2), root_children=(6,)),
    "a root that is used first": Sharded((2, 2), root_children=(0,)),
    "clipped": Sharded((2, 2), max_norm=0.05),
    "no reduction before the last micro-batch": Sharded((2, 2), micro_batches=(NO_SYNC, NO_SYNC, LAST)),
    "all-reduces in the last micro-batch": Sharded((2, 2), micro_batches=(NO_ALL_REDUCE, NO_ALL_REDUCE, LAST)),
    "no resharding before the last micro-batch": Sharded((2, 2), micro_batches=(NO_RESHARD, LAST)),
    "kept through all micro-batches": Sharded((4,), reshard_after_forward=False, micro_batches=(NO_RESHARD, LAST)),
    "everything in the last micro-batch, clipped": Sharded(
        (2, 2), micro_batches=(MicroBatch(reduces=False, reshards=False), LAST), max_norm=0.1
    ),
}
IN_FLOAT64 = {  # it is divided in another way; these stand for the others
    "4",
    "2 x 4",
    "clipped",
    "no reduction before the last micro-batch",
    "all-reduces in the last micro-batch",
}
NOT_THE_LAST_BACKWARD = Sharded((2, 2), micro_batches=(MicroBatch(is_last=False), MicroBatch(is_last=False), LAST))
MIXED = {
    "bfloat16, reduced in float32": Sharded((2, 2), param_dtype=BF16, reduce_dtype=torch.float32),
    "bfloat16": Sharded((4,), param_dtype=BF16),
    "reduced in bfloat16": Sharded((2, 2), reduce_dtype=BF16),
    "bfloat16, accumulated and reduced in float32": Sharded(
        (2, 2), param_dtype=BF16, reduce_dtype=torch.float32, micro_batches=(NO_SYNC, LAST), max_norm=0.1
    ),
}
ALL = PLAIN | MIXED | {"not the last backward pass": NOT_THE_LAST_BACKWARD}
Trained = Callable[[Sharded, torch.dtype], list[tuple[np.ndarray, list[Transfer]]]]


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    """Train once for all tests; return what each rank returns."""
    pools = {4: Pool(4), 8: Pool(8)}
    done: dict[tuple[Sharded, torch.dtype], list[tuple[np.ndarray, list[Transfer]]]] = {}

    def train(how: Sharded, dtype: torch.dtype) -> list[tuple[np.ndarray, list[Transfer]]]:
        if (how, dtype) not in done:
            pool = pools[how.shard * how.replicas]
            done[how, dtype] = pool.run(by_fully_shard, how, _training(dtype), N_STEPS)
        return done[how, dtype]

    yield train
    for pool in pools.values():
        pool.close()


def _training(dtype: torch.dtype) -> Training:
    return Training("odd", "adamw", dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name,
            dtype,
            marks=pytest.mark.full if dtype == torch.float64 and name not in IN_FLOAT64 else (),
            id=f"{name}, {dtype}",
        )
        for name in PLAIN
        for dtype in (torch.float32, torch.float64)
    ],
)
def test_values_are_those_of_one_process(trained: Trained, name: str, dtype: torch.dtype) -> None:
    how = PLAIN[name]
    ours = by_one_process(how, _training(dtype), N_STEPS)
    for theirs, _ in trained(how, dtype):
        assert abs(theirs - ours).max() <= TOLERANCE[dtype] * abs(ours).max()


def test_clipping_changes_values() -> None:
    clipped = by_one_process(PLAIN["clipped"], _training(torch.float64), N_STEPS)
    whole = by_one_process(PLAIN["2 x 2"], _training(torch.float64), N_STEPS)
    assert abs(clipped - whole).max() > 1e-4


@pytest.mark.parametrize("name", MIXED)
def test_mixed_types_round_but_keep_parameters_in_their_own_type(trained: Trained, name: str) -> None:
    how = MIXED[name]
    exact = by_one_process(how, _training(torch.float32), N_STEPS)
    results = [parameters for parameters, _ in trained(how, torch.float32)]
    assert all((each == results[0]).all() for each in results)
    assert results[0].dtype == np.float32
    assert 1e-5 < abs(results[0] - exact).max() < 0.03 * abs(exact).max()


@pytest.mark.parametrize("name", ALL)
def test_collectives_are_those_of_the_rules(trained: Trained, name: str) -> None:
    """Same kinds, sizes, groups and order, in each step of each rank."""
    how = ALL[name]
    module, _ = _training(torch.float32).make()
    expected = _transfers_by_rules(how, module)
    for _, transfers in trained(how, torch.float32):
        assert transfers == [each._replace(step=step) for step in range(N_STEPS) for each in expected]


def _transfers_by_rules(how: Sharded, module: nn.Module) -> list[Transfer]:
    parameters = units_of(module, how)
    n_units = len(parameters) - len(how.root_children)
    unit = Unit(forward=1, backward=1, gather=1, reduce_scatter=1, all_reduce=1)
    settings = Settings(
        units=(unit,) * n_units,
        root=_root(how),
        reshard_after_forward=how.reshard_after_forward,
        shard=how.shard,
        replicas=len(how.mesh),  # a mesh of two dimensions all-reduces, even if there is one replica
        micro_batches=how.micro_batches,
    )
    item = {GATHER: _gather_itemsize(how, 4), REDUCE_SCATTER: _reduce_itemsize(how, 4)}
    transfers = []
    for row in rows_by_rules(settings):
        count = padded_count(parameters[row.unit], how.shard)  # that of the root, -1, is the last
        if row.kind in (GATHER, BACKWARD_GATHER):
            is_cut = row.kind == BACKWARD_GATHER and not isinstance(how.reshard_after_forward, bool | None)
            n_ranks = how.reshard_after_forward if is_cut else how.shard
            transfers.append(Transfer(0, GATHER, count * item[GATHER], n_ranks))
        elif row.kind == REDUCE_SCATTER:
            transfers.append(Transfer(0, REDUCE_SCATTER, count * item[REDUCE_SCATTER], how.shard))
        elif row.kind == ALL_REDUCE:
            nbytes = count * item[REDUCE_SCATTER] // how.shard
            transfers.append(Transfer(0, ALL_REDUCE, nbytes, how.replicas))
    return transfers


def _root(how: Sharded) -> Root | None:
    if not how.root_children:
        return None
    if how.root_children == (0,):
        return Root(gather=1, reduce_scatter=1, all_reduce=1, before=Passes(1, 1))
    return Root(gather=1, reduce_scatter=1, all_reduce=1, after=Passes(1, 1))


def _gather_itemsize(how: Sharded, itemsize: int) -> int:
    return how.param_dtype.itemsize if how.param_dtype else itemsize


def _reduce_itemsize(how: Sharded, itemsize: int) -> int:
    return how.reduce_dtype.itemsize if how.reduce_dtype else _gather_itemsize(how, itemsize)


@pytest.mark.parametrize("name", PLAIN | MIXED)
def test_bytes_that_a_rank_sends_in_a_step(trained: Trained, name: str) -> None:
    """Gather S p (N - 1) / N, reduce-scatter S q (N - 1) / N, all-reduce 2 (R - 1) / R S q / N, with padded sizes S."""
    how = (PLAIN | MIXED)[name]
    module, _ = _training(torch.float32).make()
    expected = sum((_sent_by_unit(how, module, number) for number in range(len(units_of(module, how)))), Fraction(0))
    for _, transfers in trained(how, torch.float32):
        for step in range(N_STEPS):
            assert sent_nbytes([each for each in transfers if each.step == step]) == expected


def _sent_by_unit(how: Sharded, module: nn.Module, number: int) -> Fraction:
    units = units_of(module, how)
    is_root = bool(how.root_children) and number == len(units) - 1
    count = padded_count(units[number], how.shard)
    gather = Fraction(count * _gather_itemsize(how, 4) * (how.shard - 1), how.shard)
    reduced = count * _reduce_itemsize(how, 4)
    reduce_scatter = Fraction(reduced * (how.shard - 1), how.shard)
    all_reduce = Fraction(2 * reduced * (how.replicas - 1), how.shard * how.replicas)
    n_micro_batches = len(how.micro_batches)
    n_reductions = sum(each.reduces for each in how.micro_batches)
    n_all_reduces = sum(each.reduces and each.all_reduces for each in how.micro_batches)
    reshard = how.reshard_after_forward
    is_kept = reshard is False or (is_root and reshard is None)
    keeps_between = not how.micro_batches[0].reshards
    n_forward_gathers = 1 if keeps_between else n_micro_batches
    n_backward_gathers = 0 if is_kept else n_micro_batches
    backward_gather = gather
    if reshard not in (None, True, False):
        backward_gather = Fraction(count * _gather_itemsize(how, 4) * (reshard - 1), reshard)
    gathers = n_forward_gathers * gather + n_backward_gathers * backward_gather
    return gathers + n_reductions * reduce_scatter + n_all_reduces * all_reduce


def test_padding_is_paid_for() -> None:
    """Rows 7, 5, 9 and 3 of weights and biases on 4 ranks: as if they were 8, 8, 12 and 4."""
    module, _ = _training(torch.float32).make()
    counts = [padded_count(unit, 4) for unit in units_of(module, Sharded((4,)))]
    assert counts == [8 * 6 + 8, 8 * 7 + 8, 12 * 5 + 12, 4 * 9 + 4]
    assert [sum(each.numel() for each in unit) for unit in units_of(module, Sharded((4,)))] == [49, 40, 54, 30]


def test_root_children_are_no_units() -> None:
    module, _ = _training(torch.float32).make()
    parameters = list(module.parameters())
    assert [len(unit) for unit in units_of(module, Sharded((4,), root_children=(6,)))] == [2, 2, 2, 2]
    assert units_of(module, Sharded((4,), root_children=(0,)))[ROOT][0] is parameters[0]
