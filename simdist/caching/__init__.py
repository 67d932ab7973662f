"""Caches of samples: the level of each read follows from the plan alone, for the simulator and for real readers.

The order of the samples is known. So the contents of each node's caches are known at each load, and no cache needs to
be queried. If a real reader still misses a sample, it falls back to the next level. Its own counts show that.
"""

from simdist.caching.lookup import BatchReads, epoch_order, look_up, node_part, on_disk_at_first, staged_samples

__all__ = ["BatchReads", "epoch_order", "look_up", "node_part", "on_disk_at_first", "staged_samples"]
