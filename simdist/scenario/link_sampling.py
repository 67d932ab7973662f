"""Draw what links do: the same for the same seed, whatever else is asked for.

As in `simdist.scenario.sampling`, numbers come from a counter-based generator (Philox 4x64), so that they follow from
their place: the n-th number of a link belongs to (seed, disturbance, link, n).

    key     = (seed, index of the disturbance, or of the flows, in its list)
    counter = (place in the tile, number of the tile, node of the link, 1; of flows 2)

Number n belongs to period n or, where lengths are drawn, to the n-th of them after the state at the start. So the both
directions of a network card, and all flows of an entry, do the same at the same time.
"""

from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import TypeAlias, assert_never

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from simdist.scenario import links
from simdist.scenario.links import LinkDisturbance, TrafficPattern

_Floats: TypeAlias = NDArray[np.float64]
#: When a flow begins, seconds, and its bytes or its end; the other is None.
_Flight: TypeAlias = tuple[float, float | None, float | None]

_TILE = 256  # numbers made at once
_UNUSED_BITS = np.uint64(11)  # a double has 53
_ONE = np.uint64(1)
_LINKS = 1
_FLOWS = 2


def link_shares(
    disturbance: LinkDisturbance,
    *,
    seed: int,
    index: int,
    place: int,
    read: Callable[[links.LinkRecorded], _Floats] = links.LinkRecorded.table,
) -> Iterator[tuple[float, float]]:
    """Yield what a disturbance leaves of one of its links: from when, seconds, and the share from then on.

    The first time is 0.0, times ascend, and a share may be the same as the one before.

    Args:
        disturbance: What disturbs it.
        seed: From 0 to 2**64 - 1.
        index: Of the disturbance in the scenario.
        place: Which link: a node, or 0; see `places` of the disturbance.
        read: Reads a recording, which has all links: one that remembers reads it once.

    >>> slow = links.LinkPersistent(link="nic", share=0.5, begin_s=2.0, end_s=3.0)
    >>> list(link_shares(slow, seed=0, index=0, place=0))
    [(0.0, 1.0), (2.0, 0.5), (3.0, 1.0)]
    """
    tiles = uniform_tiles(seed, index, place, _LINKS)
    match disturbance:
        case links.LinkPersistent(share=share, begin_s=begin_s, end_s=end_s):
            return _spans(iter([(begin_s, end_s)]), share)
        case links.LinkJitter():
            return _jitter(disturbance, tiles)
        case links.LinkBursts():
            return _bursts(disturbance, tiles)
        case links.LinkOutages():
            return _spans(_outages(disturbance, tiles), 0.0)
        case links.LinkRecorded():
            column = 1 + disturbance.places(place + 1).index(place)
            return ((at_s, share) for at_s, share in read(disturbance)[:, [0, column]].tolist())
        case _:
            assert_never(disturbance)


def flights(flows: TrafficPattern, *, seed: int, index: int) -> Iterator[_Flight]:
    """Yield the flights of one flow in the order of their beginnings; `index` is that of the flows in the scenario."""
    match flows:
        case links.Steady(begin_s=begin_s, end_s=end_s):
            return iter([(begin_s, None, np.inf if end_s is None else end_s)])
        case links.Periodic(begin_s=begin_s, every_s=every_s, nbytes=nbytes):
            return ((begin_s + number * every_s, float(nbytes), None) for number in count())
        case links.OnOff(lengths="fixed", begin_s=begin_s, on_s=on_s, off_s=off_s):
            begins = (begin_s + number * (on_s + off_s) for number in count())
            return ((begin_s, None, begin_s + on_s) for begin_s in begins)
        case links.OnOff(begin_s=begin_s, on_s=on_s, off_s=off_s):
            spans = _random_spans(on_s, off_s, uniform_tiles(seed, index, 0, _FLOWS))
            return ((begin_s + on, None, begin_s + off) for on, off in spans)
        case _:
            assert_never(flows)


def uniform_tiles(seed: int, index: int, place: int, what: int) -> Iterator[_Floats]:
    """Yield odd multiples of 2^-53, never 0 or 1, 256 at a time, without end.

    Args:
        seed: From 0 to 2**64 - 1.
        index: First word of the key after the seed.
        place: Third word of the counter.
        what: Fourth word, which tells uses with equal keys apart: 1 and 2 here, 3 of failures.
    """
    key = np.array([seed, index], dtype=np.uint64)
    for tile in count():
        words = Philox(key=key, counter=np.array([0, tile, place, what], dtype=np.uint64)).random_raw(_TILE)
        yield ((words >> _UNUSED_BITS) | _ONE).astype(np.float64) * 2.0**-53


def _spans(
    spans: Iterator[tuple[float, float]] | Iterator[tuple[float, float | None]], share: float
) -> Iterator[tuple[float, float]]:
    """Yield a share within spans, which ascend, and 1 outside; the last may have no end."""
    for number, (begin_s, end_s) in enumerate(spans):
        if begin_s > 0 and not number:
            yield 0.0, 1.0
        yield begin_s, share
        if end_s is not None:
            yield end_s, 1.0


def _jitter(jitter: links.LinkJitter, tiles: Iterator[_Floats]) -> Iterator[tuple[float, float]]:
    from simdist.scenario.portable import exp, normal_quantile

    for tile, drawn in enumerate(tiles):
        shares = np.minimum(jitter.median * exp(jitter.sigma * normal_quantile(drawn)), 1.0)
        yield from ((period * jitter.period_s, share) for period, share in enumerate(shares.tolist(), tile * _TILE))


def _bursts(bursts: links.LinkBursts, tiles: Iterator[_Floats]) -> Iterator[tuple[float, float]]:
    """Yield changes, and the share at the start of every tile: a chain may stay as it is for very long."""
    is_on: bool | None = None
    for tile, drawn in enumerate(tiles):
        for place, uniform in enumerate(drawn.tolist()):
            was_on = is_on
            if was_on is None:
                is_on = uniform < bursts.enter / (bursts.enter + bursts.leave)
            else:
                is_on = uniform < (1.0 - bursts.leave if was_on else bursts.enter)
            if is_on != was_on or not place:
                yield (tile * _TILE + place) * bursts.period_s, bursts.share if is_on else 1.0


def _outages(outages: links.LinkOutages, tiles: Iterator[_Floats]) -> Iterator[tuple[float, float]]:
    """Yield begin and end of every outage."""
    if outages.up_s is not None and outages.down_s is not None:
        yield from _random_spans(outages.down_s, outages.up_s, tiles)
        return
    assert outages.at_s is not None
    assert outages.lasts_s is not None
    yield outages.at_s, outages.at_s + outages.lasts_s
    if outages.every_s is not None:
        begins = (outages.at_s + number * outages.every_s for number in count(1))
        yield from ((begin_s, begin_s + outages.lasts_s) for begin_s in begins)


def _random_spans(on_s: float, off_s: float, tiles: Iterator[_Floats]) -> Iterator[tuple[float, float]]:
    """Yield begin and end of the spans of a state that is on and off for exponential times of these means."""
    from simdist.scenario.portable import log

    first = next(tiles)
    is_on = bool(first[0] < on_s / (on_s + off_s))  # exponential times have no memory: what is left of one is like it
    lengths = (-log(drawn) for drawn in chain([first[1:]], tiles))
    now_s = 0.0
    for length in chain.from_iterable(each.tolist() for each in lengths):
        then_s = now_s + length * (on_s if is_on else off_s)
        if is_on:
            yield now_s, then_s
        now_s = then_s
        is_on = not is_on
