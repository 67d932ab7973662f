"""Caches of samples: a load finds each on a level that follows from the plan alone, for simulator and real readers.

The order of the samples is known, so what the caches of every node hold at any load is known too, and no cache has to
be asked. A real reader that finds something missing all the same falls back to the next level; what it then did is in
its own counts.
"""

from simdist.caching.lookup import BatchReads, epoch_order, look_up, node_part, on_disk_at_first, staged_samples

__all__ = ["BatchReads", "epoch_order", "look_up", "node_part", "on_disk_at_first", "staged_samples"]
