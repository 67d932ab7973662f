"""Ranks read what torch's `DistributedSampler` would give them."""

import pytest
from torch.utils.data import BatchSampler, DistributedSampler

from simdist.caching import epoch_order
from simdist.plan import Dataset


@pytest.mark.parametrize("n_samples", [12, 13, 17, 23, 24])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (3, 4), (4, 2), (2, 5)])
def test_unshuffled_epoch_is_dealt_as_by_the_distributed_sampler(
    n_samples: int, world_size: int, batch_size: int
) -> None:
    dataset = Dataset(n_samples, batch_size, 1, 1, (1,), shuffle="none")
    ours = epoch_order(dataset, 3, world_size)
    for rank in range(world_size):
        samples = DistributedSampler(
            range(n_samples), num_replicas=world_size, rank=rank, shuffle=False, drop_last=True
        )
        theirs = [*BatchSampler(samples, batch_size, drop_last=True)]
        assert ours[:, rank].tolist() == theirs
