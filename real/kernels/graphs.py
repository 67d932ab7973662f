"""CUDA graphs of operations on buffers: kernels that are recorded once, and launched together in every step.

A selection is a dozen short kernels. Below some ten million elements, Python takes longer to launch them than they run.
The plan fixes their buffers and sizes, so one graph serves all steps.

**Addresses.** A graph has the addresses of its buffers, and belongs to them: at other addresses, such as of memory that
was given back and taken again, the kernels are launched one by one. Its temporary tensors lie in a pool that the graphs
of a lane share, since they run one after the other. Nothing may keep a tensor of that pool: the next graph overwrites
it. So a recorded operation leaves its results in the buffers of the plan.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

_Key = tuple[Hashable, tuple[int, ...]]


@dataclass(slots=True)
class _Room:
    """What the graphs of one lane share.

    Args:
        drawn: The random number of the next replay, float64 `[]`.
        pool: Memory of temporary tensors; None before the first graph.
    """

    drawn: Tensor
    pool: Any = None


@final
class Graphs:
    """The graphs of a rank.

    Args:
        device: The GPU.

    Attributes:
        refused: Operation -> why the driver could not record it.
    """

    def __init__(self, device: torch.device) -> None:
        self.refused: dict[Hashable, str] = {}
        self._device = device
        self._rooms: dict[Hashable, _Room] = {}
        self._graphs: dict[_Key, tuple[torch.cuda.CUDAGraph, _Room]] = {}

    def __contains__(self, op: object) -> bool:
        return any(op == recorded for recorded, _ in self._graphs)

    def record(
        self, op: Hashable, lane: Hashable, tensors: Sequence[Tensor], enqueue: Callable[[Tensor], None]
    ) -> None:
        """Record an operation that was performed before, so that its kernels are compiled; nothing is performed.

        Args:
            op: The operation.
            lane: Its lane. Graphs of one lane never run at the same time.
            tensors: All tensors that it reads or writes besides temporary ones.
            enqueue: Enqueues its kernels. It gets the tensor of the random number.
        """
        room = self._rooms.setdefault(lane, _Room(torch.zeros((), dtype=torch.float64, device=self._device)))
        stream = torch.cuda.Stream(self._device)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):  # the default stream cannot be recorded
                graph.capture_begin(pool=room.pool, capture_error_mode="thread_local")  # other threads use the GPU
                try:
                    enqueue(room.drawn)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.refused[op] = str(error).partition("\n")[0]
            return
        room.pool = graph.pool()
        self._graphs[op, _addresses(tensors)] = graph, room

    def replay(self, op: Hashable, tensors: Sequence[Tensor], drawn: float) -> bool:
        """Launch the kernels of an operation on the current stream, if they were recorded for these tensors.

        Args:
            op: The operation.
            tensors: Those of `record`.
            drawn: The random number.

        Returns:
            False if nothing was launched.
        """
        found = self._graphs.get((op, _addresses(tensors)))
        if found is None:
            return False
        graph, room = found
        room.drawn.fill_(drawn)
        graph.replay()
        return True


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
