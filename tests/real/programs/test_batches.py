"""Each pass of each step has a batch of its own."""

import torch

from real.programs.batches import PassBatches
from simdist.schedules import Job, Sync


def test_passes_are_numbered_over_all_steps() -> None:
    plan = Sync().plan(Job(world_size=1, ranks_per_node=1, n_steps=3, tensor_counts=(4,), micro_batches=2))
    batches = PassBatches(plan, lambda number: (torch.tensor([number]),) * 2, None, torch.device("cpu"))
    found = [batches.next((), step)[0].item() for step in range(3) for _ in range(2)]
    assert found == [0, 1, 2, 3, 4, 5]
    assert batches.next((), 1)[0].item() == 2  # as a job that resumes
