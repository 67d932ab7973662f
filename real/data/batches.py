"""The batches of a plan with a data set, in its host buffers."""

from typing import final

import torch
from torch import Tensor

from real.buffers.memory import Memory
from real.data.inputs import InputReader
from real.programs.base import Batch, Feed
from simdist.errors import PlanError
from simdist.plan import Load, Plan, StageIn


def batch_buffers(plan: Plan) -> set[str]:
    """Return the names of the buffers that batches are loaded into."""
    return {op.dst for body in plan.bodies for op in body if isinstance(op, Load)}


@final
class BatchFeed(Feed):
    """Loads batches into the buffers of a plan.

    Args:
        plan: The plan that is executed.
        source: Of the samples.
        memory: Has the buffers that batches are loaded into; pinned, if there is a GPU.

    Raises:
        PlanError: A buffer is of another size.
    """

    def __init__(self, plan: Plan, source: InputReader, memory: Memory) -> None:
        self._source = source
        self._loaded: dict[str, Batch] = {}
        shape = source.dataset.batch_size, *source.sources.shape
        for name in batch_buffers(plan):
            buffer = memory.dense(name)
            if buffer.dtype != torch.uint8 or buffer.shape != (torch.Size(shape).numel(),):
                raise PlanError(
                    f"plan {plan.name}: buffer {name} is {buffer.dtype} {list(buffer.shape)}; a batch is uint8 "
                    f"{list(shape)}: set workload.sample_size to the bytes of a decoded sample"
                )
            labels = torch.zeros(source.dataset.batch_size, dtype=torch.int64, pin_memory=buffer.is_pinned())
            self._loaded[name] = buffer.view(shape), labels

    def load(self, op: Load, number: int) -> None:
        """Read batch `number` into its buffer."""
        self._source.fill(number, *self._loaded[op.dst])

    def stage_in(self, op: StageIn) -> None:
        """Bring the node's files to its disk."""
        self._source.stage_in()

    def batch(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the batch in a buffer."""
        return self._loaded[name]
