"""Jobs under `fully_shard`: their settings, drawn at random too, and the rows that say when each operation ran."""

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

ROOT = -1
"""The number of the root, if it holds parameters of its own; the units count from 0."""

FORWARD = "forward"
BACKWARD = "backward"
GATHER = "gather"
BACKWARD_GATHER = "backward_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
OPTIMIZE = "optimize"


@dataclass(frozen=True)
class Unit:
    """The times of a unit, in ms.

    Attributes:
        forward: Its forward pass.
        backward: Its backward pass.
        gather: An all-gather over the ranks that shard it.
        reduce_scatter: A reduce-scatter over the same ranks.
        all_reduce: An all-reduce of its shard between the replicas.
        optimize: The update of its shard.
        regather: An all-gather over the fewer ranks of an integer `reshard_after_forward`; `gather` by default.
        reshard_after_forward: Of this unit, instead of that of the settings.
    """

    forward: int
    backward: int
    gather: int
    reduce_scatter: int
    all_reduce: int = 0
    optimize: int = 0
    regather: int | None = None
    reshard_after_forward: bool | int | None = None


@dataclass(frozen=True)
class Passes:
    """What the root computes at one place of the model: ms of its forward and of its backward pass."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Root:
    """A root that holds parameters of its own. It uses them before the first unit, after the last one, or at both.

    Times as of `Unit`.
    """

    gather: int
    reduce_scatter: int
    all_reduce: int = 0
    optimize: int = 0
    regather: int | None = None
    before: Passes | None = None
    after: Passes | None = None


@dataclass(frozen=True)
class MicroBatch:
    """What is set before the forward pass of a micro-batch.

    Attributes:
        reduces: `set_requires_gradient_sync`.
        all_reduces: `set_requires_all_reduce`, where `reduces`.
        reshards: `set_reshard_after_backward`.
        is_last: `set_is_last_backward`.
    """

    reduces: bool = True
    all_reduces: bool = True
    reshards: bool = True
    is_last: bool = True


@dataclass(frozen=True)
class Settings:
    """A job, all ranks of which are alike.

    Attributes:
        units: In the order of the forward pass.
        root: None if the root holds no parameters of its own. It is wrapped either way.
        reshard_after_forward: Of each call of `fully_shard`, the root's too.
        shard: Ranks that share a unit.
        replicas: Copies of these; from 2 on it is HSDP.
        micro_batches: Of one step.
        n_steps: Steps, one after the other.
        forward_prefetch: Units ahead that each unit names to `set_modules_to_forward_prefetch`, and the root if it
            computes first; 0: it is not called.
        backward_prefetch: The same for `set_modules_to_backward_prefetch`.
        copy_out: ms of each copy out of what was gathered, on compute.
        separate_group: `set_separate_reduce_scatter_group`.
        max_input_buffers: `set_reduce_scatter_max_input_buffers`.
        input_needs_gradient: The input of the model requires a gradient.
        serial: All streams are one, as on CPUs, where each collective blocks the host.
    """

    units: tuple[Unit, ...]
    root: Root | None = None
    reshard_after_forward: bool | int | None = None
    shard: int = 2
    replicas: int = 1
    micro_batches: tuple[MicroBatch, ...] = (MicroBatch(),)
    n_steps: int = 1
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    copy_out: int = 0
    separate_group: bool = False
    max_input_buffers: int = 1
    input_needs_gradient: bool = False
    serial: bool = False


@dataclass(frozen=True)
class OneRank:
    """What one of several ranks meets.

    Attributes:
        late: ms that its computing begins later, of each step and micro-batch.
        begins: When each of its collectives begins at the earliest, in the order in which the host issues them.
    """

    late: tuple[tuple[int, ...], ...] = ()
    begins: tuple[int, ...] = ()

    def late_by(self, step: int, micro_batch: int) -> int:
        return self.late[step][micro_batch] if self.late else 0

    def begins_at(self, number: int) -> int:
        return self.begins[number] if self.begins else 0


ALIKE = OneRank()


class Row(NamedTuple):
    """One operation on the device or on the wire; `micro_batch` is that in which the host issued it."""

    step: int
    micro_batch: int
    kind: str
    unit: int
    start: int
    end: int


def random_settings(seed: int) -> Settings:
    """Draw settings of every kind, the same for the same seed."""
    draw = random.Random(seed)
    replicas = draw.choice((1, 1, 2, 3))
    shard = draw.choice((2, 2, 4, 4, 8, 1))
    root = _random_root(draw) if draw.random() < 0.6 else None
    return Settings(
        units=_random_units(draw),
        root=root,
        reshard_after_forward=draw.choice((None, None, True, False, _random_factor(draw, shard))),
        shard=shard,
        replicas=replicas,
        micro_batches=_random_micro_batches(draw),
        n_steps=draw.choice((1, 1, 2)),
        forward_prefetch=draw.choice((0, 0, 0, 1, 2, 3)),
        backward_prefetch=draw.choice((0, 0, 0, 1, 2, 3)),
        separate_group=draw.random() < 0.3,
        max_input_buffers=draw.choice((1, 1, 1, 2, 3)),
        input_needs_gradient=draw.random() < 0.25,
        copy_out=draw.choice((0, 0, 1, 2, 5)),
    )


def _random_units(draw: random.Random) -> tuple[Unit, ...]:
    n_units = draw.randint(1, 6)
    if draw.random() < 0.4:
        units = [_random_unit(draw)] * n_units
    else:
        units = [_random_unit(draw) for _ in range(n_units)]
    if draw.random() < 0.2:
        units[-1] = replace(units[-1], reshard_after_forward=False)
    return tuple(units)


def _random_unit(draw: random.Random) -> Unit:
    return Unit(
        forward=draw.randint(1, 10),
        backward=draw.randint(1, 20),
        gather=draw.randint(1, 12),
        reduce_scatter=draw.randint(1, 16),
        all_reduce=draw.randint(1, 24),
        optimize=draw.randint(0, 2),
        regather=draw.randint(1, 8),
    )


def _random_root(draw: random.Random) -> Root:
    uses = draw.choice(("before", "after", "both"))
    return Root(
        gather=draw.randint(1, 12),
        reduce_scatter=draw.randint(1, 16),
        all_reduce=draw.randint(1, 24),
        optimize=draw.randint(0, 2),
        regather=draw.randint(1, 8),
        before=None if uses == "after" else Passes(draw.randint(1, 6), draw.randint(1, 12)),
        after=None if uses == "before" else Passes(draw.randint(1, 6), draw.randint(1, 12)),
    )


def _random_factor(draw: random.Random, shard: int) -> int:
    return draw.choice([each for each in range(1, shard + 1) if shard % each == 0])


def _random_micro_batches(draw: random.Random) -> tuple[MicroBatch, ...]:
    """Draw micro-batches, the last of which sets everything back, and those before it are alike or differ."""
    n_earlier = draw.choice((0, 0, 1, 2, 3))
    if draw.random() < 0.7:
        earlier = [_random_micro_batch(draw)] * n_earlier
    else:
        earlier = [_random_micro_batch(draw) for _ in range(n_earlier)]
    return (*earlier, MicroBatch())


def _random_micro_batch(draw: random.Random) -> MicroBatch:
    return MicroBatch(
        reduces=draw.random() < 0.6,
        all_reduces=draw.random() < 0.5,
        reshards=draw.random() < 0.6,
        is_last=draw.random() < 0.6,
    )
