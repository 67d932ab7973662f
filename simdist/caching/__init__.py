"""Which sample a load finds on which level, decided by the plan alone, so that simulator and real readers do the same.

The order of the samples is known (`simdist.caching.order`), so what the caches of every node hold at any load is known
too (`simdist.caching.lookup`): nobody need ask a cache. A real reader that finds something missing all the same falls
back to the next level; what it then did is in its own counts.
"""

from simdist.caching.batch import BatchReads
from simdist.caching.lookup import look_up, on_disk_at_first, staged_samples
from simdist.caching.order import epoch_order, node_part

__all__ = ["BatchReads", "epoch_order", "look_up", "node_part", "on_disk_at_first", "staged_samples"]
