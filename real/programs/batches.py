"""The batches of a program's passes: made or read on the host, and copied to the device."""

from collections.abc import Callable, Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from real.programs.base import Batch, Feed, normalised
from simdist.plan import Plan, ops


@final
class PassBatches:
    """Holds the batches of a step by the buffers of the plan that have them.

    Args:
        plan: The plan.
        make: Number of a pass, counted over all steps -> its input and target.
        feed: Reads batches of images in place of `make`, which then serves only for their format.
        device: Device of the passes.
    """

    def __init__(self, plan: Plan, make: Callable[[int], Batch], feed: Feed | None, device: torch.device) -> None:
        self._make = make
        self._feed = feed
        self._device = device
        self._n_passes = max(1, *(len(ops.forward_passes(body)) for body in plan.bodies))
        self._in_memory = {buffer.name for buffer in plan.buffers if buffer.place == "host" and buffer.initialized}
        self._held: dict[str, Sequence[Batch]] = {}
        self._at = -1, 0  # step, and its next pass
        self._ahead = _Ahead(self.made, plan.n_steps * self._n_passes, device) if device.type == "cuda" else None

    def made(self, number: int) -> Batch:
        """Make the batch of a pass, and return it on the device."""
        inputs, targets = self._make(number)
        return self._on_device(inputs), self._on_device(targets)

    def stage_in(self, op: ops.StageIn) -> None:
        """Stage the data in; generated data is not staged in."""
        if self._feed is not None:
            self._feed.stage_in(op)

    def load(self, op: ops.Load, number: int) -> None:
        """Read or make the batches of a step, on the host."""
        if self._feed is not None:
            self._feed.load(op, number)
        else:
            self._held[op.dst] = self._of_step(number)

    def copy(self, op: ops.Copy, step: int) -> None:
        """Copy the batches of a step to the device."""
        if self._feed is not None:
            self._held[op.dst] = self._from_feed(self._feed, op.src)
            return
        batches = self._of_step(step) if op.src in self._in_memory else self._held[op.src]
        self._held[op.dst] = [(self._on_device(inputs), self._on_device(targets)) for inputs, targets in batches]

    def next(self, names: Iterable[str], step: int) -> Batch:
        """Return the batch of the next pass of a step: one that a buffer has, or else a new one.

        On a GPU, the new one has been copied while earlier passes computed.
        """
        number = self._at[1] if self._at[0] == step else 0
        self._at = step, number + 1
        held = next((self._held[name][number] for name in names if name in self._held), None)
        if held is not None:
            return held
        take = self.made if self._ahead is None else self._ahead.take
        return take(step * self._n_passes + number)

    def _of_step(self, step: int) -> list[Batch]:
        """Return the batches of the passes of a step, on the host."""
        first = step * self._n_passes
        return [self._make(number) for number in range(first, first + self._n_passes)]

    def _from_feed(self, feed: Feed, name: str) -> list[Batch]:
        """Copy a step's samples to the device, in the module's format; then the buffer may receive the next ones.

        Returns:
            Equal parts of the samples, one for each pass.
        """
        images, labels = feed.batch(name)
        like, _ = self._make(0)
        inputs = normalised(images, like.shape[1:], self._device, like.dtype)
        labels = labels.to(self._device, non_blocking=True, copy=True)
        return list(zip(inputs.chunk(self._n_passes), labels.chunk(self._n_passes), strict=True))

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


@final
class _Ahead:
    """Copies the batch of the next pass to a GPU on a stream of its own, while a pass computes.

    Args:
        make: Number of a pass -> its batch, copied on the current stream.
        n_passes: Passes of the run.
        device: The GPU.
    """

    def __init__(self, make: Callable[[int], Batch], n_passes: int, device: torch.device) -> None:
        self._make = make
        self._n_passes = n_passes
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copied: dict[int, tuple[Batch, torch.cuda.Event]] = {}  # of one pass at most

    def take(self, number: int) -> Batch:
        """Return the batch of a pass for use on the current stream, and begin to copy that of the next one."""
        if number not in self._copied:
            self._copy(number)
        batch, copied = self._copied[number]
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        for tensor in batch:
            tensor.record_stream(computing)  # its memory is not free for the next copies before it was used
        self._copied.clear()
        if number + 1 < self._n_passes:
            self._copy(number + 1)
        return batch

    def _copy(self, number: int) -> None:
        with torch.cuda.stream(self._stream):
            batch = self._make(number)
        self._copied[number] = batch, self._stream.record_event()
