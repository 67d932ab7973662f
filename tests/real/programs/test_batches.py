"""Each pass of each step has a batch of its own."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from pretended import GPU, Cuda, Stream

from real.programs.batches import PassBatches
from simdist.schedules import Job, Sync


def test_passes_are_numbered_over_all_steps() -> None:
    plan = Sync().plan(Job(world_size=1, ranks_per_node=1, n_steps=3, tensor_counts=(4,), micro_batches=2))
    batches = PassBatches(plan, lambda number: (torch.tensor([number]),) * 2, None, torch.device("cpu"))
    found = [batches.next((), step)[0].item() for step in range(3) for _ in range(2)]
    assert found == [0, 1, 2, 3, 4, 5]
    assert batches.next((), 1)[0].item() == 2  # as a job that resumes


class OnDevice:
    """A tensor on a pretended GPU.

    Attributes:
        number: Its pass.
        used_on: Streams that were said to use it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.used_on: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.used_on.append(stream)


class Copies:
    """What a pretended GPU copies: pass -> stream of its copies; and the passes whose copies a stream waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda = Cuda(monkeypatch)
        self.streams: dict[int, Stream] = {}
        self.waits: list[tuple[Stream, int]] = []
        monkeypatch.setattr(Stream, "record_event", lambda stream: [*self.streams][-1])
        monkeypatch.setattr(Stream, "wait_event", lambda stream, event: self.waits.append((stream, event)))

    def batch(self, number: int) -> tuple["OnHost", "OnHost"]:
        return OnHost(number, self), OnHost(number, self)


@dataclass(frozen=True)
class OnHost:
    """A tensor of a pass on the host."""

    number: int
    copies: Copies

    def to(self, device: torch.device, non_blocking: bool) -> OnDevice:
        assert (device, non_blocking) == (GPU, True)
        self.copies.streams[self.number] = self.copies.cuda.current
        return OnDevice(self.number)


def on_device(batch: Iterable[object]) -> list[OnDevice]:
    return [each for each in batch if isinstance(each, OnDevice)]


def test_the_next_batch_is_copied_beside_the_pass_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    plan = Sync().plan(Job(world_size=1, ranks_per_node=1, n_steps=3, tensor_counts=(4,), micro_batches=2))
    batches = PassBatches(plan, copies.batch, None, GPU)
    computing = copies.cuda.default
    for number in range(6):
        batch = on_device(batches.next((), number // 2))
        assert [each.number for each in batch] == [number] * 2
        assert all(each.used_on == [computing] for each in batch)
        assert copies.waits[-1] == (computing, number)
        assert [*copies.streams] == [*range(min(number + 2, 6))], "the batch behind the last one does not exist"
    assert computing not in copies.streams.values()
    assert len({*copies.streams.values()}) == 1
    assert [each.number for each in on_device(batches.next((), 1))] == [2, 2], "as a job that resumes"
