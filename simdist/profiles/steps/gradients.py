"""Parameter tensors and the batch size, as far as a trace with recorded shapes tells them."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from simdist.profiles.kineto.classify import What
from simdist.profiles.kineto.timeline import UNKNOWN, Events, Floats, Ints
from simdist.profiles.steps.host import Passes
from simdist.profiles.steps.model import Gradient
from simdist.profiles.steps.phase_spans import Phase, Phases
from simdist.profiles.steps.steps import Computed, Span


def gradients_of(
    host: Events, spans: Sequence[Span], passes: Passes, phases: Phases, computed: Computed
) -> tuple[tuple[Gradient, ...], list[str]]:
    """Return the parameters in the order in which their gradients become ready, and notes on what is amiss.

    Args:
        host: What the host did.
        spans: The steps; each has a backward pass.
        passes: The backward passes; the last of each step counts, because it is the one that reduces gradients.
        phases: Of the device.
        computed: When the device had computed what was launched before an instant.
    """
    ready = host.of(What.READY)
    found: dict[tuple[int, ...], list[Floats]] = {}
    for span in spans:
        counts, seconds = _in_step(ready, span, passes, phases, computed)
        if len(counts) and np.all(counts != UNKNOWN):
            found.setdefault(tuple(counts.tolist()), []).append(seconds)
    if not found:
        return (), []
    counts_of, times = max(found.items(), key=lambda item: len(item[1]))
    medians_s = np.median(times, axis=0).tolist()
    gradients = tuple(Gradient(count, max(0.0, median_s)) for count, median_s in zip(counts_of, medians_s, strict=True))
    other = sum(map(len, found.values())) - len(times)
    note = f"in {other} of {len(spans)} steps gradients become ready in another order; their times are left out"
    return gradients, [note] if other else []


def _in_step(ready: Events, span: Span, passes: Passes, phases: Phases, computed: Computed) -> tuple[Ints, Floats]:
    """Return sizes of the gradients of a step's last backward pass, and the backward seconds before each."""
    last = int(np.searchsorted(passes.start_s, span.host.end_s)) - 1
    begin_s, end_s = passes.start_s[last], passes.end_s[last]
    first, behind = np.searchsorted(ready.start_s, [begin_s, end_s]).tolist()
    instants_s = computed(np.append(begin_s, ready.end_s[first:behind]))
    spent_s = phases.before(Phase.BACKWARD, np.clip(instants_s, span.start_s, span.end_s))
    return ready.link[first:behind], np.diff(np.maximum.accumulate(spent_s))


def batch_size_of(own: Events, spans: Iterable[Span]) -> int | None:
    """Return the samples of a batch: the first dimension of what the first layer of a step takes, in most steps."""
    layers = own.of(What.LAYER)
    firsts = np.searchsorted(layers.start_s, [span.host.start_s for span in spans])
    told = [int(size) for size in layers.link[firsts[firsts < len(layers)]] if size != UNKNOWN]
    return Counter(told).most_common(1)[0][0] if told else None
