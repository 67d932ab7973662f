"""Draw the delays of disturbances: the same numbers for the same seed, whatever else is asked for.

One number belongs to each (seed, disturbance, step, rank). The generator is counter-based (Philox 4x64): the number
follows from its place, not from the numbers drawn before it. A longer run, a larger world, more seeds, other chunks or
one more disturbance at the end of the list leave it as it was.

    key     = (seed, index of the disturbance in the list)
    counter = (place in the tile, number of the tile, lane, 0)

A *tile* is 16 steps of all ranks, rank by rank: large enough that drawing is fast, small enough to keep little memory.
The *lane* tells several numbers of one place apart.

If a step has several micro-batches, each has its own delay. What comes once in a step falls into one of them, each as
likely as any other: a number at (place in the tile, number of the tile, 0, 1) says which. What comes at a fixed time
falls into the first. What lasts a whole step is spread evenly. Noise has a number for each micro-batch, its lane. A
load is that of a whole step, so `io` delays are drawn as for one micro-batch.

Where recordings are resampled, the block that a run has at a place follows from seed and place alone, not from the
disturbance: what was recorded together stays together. It has a key of its own, and 16 blocks a tile.

Run 0 of a study has the study's seed. The seeds of all further runs follow from it, see `run_seeds`: those of studies
with the seeds 0 and 1 have nothing in common.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never, final

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from simdist.errors import ScenarioError
from simdist.plan.delays import of_micro_batches
from simdist.plan.ops import Channel
from simdist.scenario import disturbances as kinds
from simdist.scenario.disturbances import Disturbance, read_recorded

if TYPE_CHECKING:
    from simdist.scenario.other_ranks import PlayedRanks
    from simdist.scenario.pauses_and_work import Pausing, Working

_Floats: TypeAlias = NDArray[np.float64]
_Words: TypeAlias = NDArray[np.uint64]

_TILE_STEPS = 16
_WORDS_AT_ONCE = 4  # that a counter gives
_BATCH_SIZE = 2**17  # numbers worked on at once: they stay in the cache
_UNUSED_BITS = np.uint64(11)  # a double has 53
_ONE = np.uint64(1)
_COMPARED_STEPS = 64  # of what code of a user returns twice
_RESAMPLING = 2**64 - 1  # takes the place of a disturbance's index in the key
_RUNS = 2**64 - 3  # so does this, for seeds of runs
_DELAY, _PLACE = range(2)  # what a number decides: a delay, or the micro-batch that it falls into


def run_seeds(seed: int, n: int, *, first: int = 0) -> list[int]:
    """Return the seeds of the runs of a study, by number. Run 0 has the seed of the study.

    Args:
        seed: Of the study, from 0 to 2**64 - 1.
        n: Number of runs.
        first: Number of the first of them.

    Returns:
        Seeds below 2**53, but for that of the study: JSON keeps them exactly. Different studies share none.

    >>> run_seeds(0, 3)
    [0, 4725872354239234, 826979650918141]
    >>> run_seeds(0, 1, first=2)
    [826979650918141]
    """
    counter, skipped = divmod(first, _WORDS_AT_ONCE)
    generator = Philox(key=np.array([seed, _RUNS], dtype=np.uint64), counter=counter)
    seeds: list[int] = (generator.random_raw(skipped + n)[skipped:] >> _UNUSED_BITS).tolist()
    return [seed, *seeds[1:]] if n and not first else seeds


def sampler(
    disturbances: Sequence[Disturbance | None],
    *,
    seeds: Sequence[int],
    world_size: int,
    ranks_per_node: int,
    compute_s: _Floats,
    micro_batches: int = 1,
) -> "DelaySampler":
    """Return a sampler of the delays of all `seeds` at once.

    Args:
        disturbances: As in the scenario; their places count, also of those left out as None.
        seeds: Each from 0 to 2**64 - 1.
        world_size: Ranks.
        ranks_per_node: Consecutive ranks that share a node.
        compute_s: Forward and backward seconds of a step of each rank, shape `[world_size]`.
        micro_batches: Passes of a step.

    >>> late = kinds.Transient(probability=0.5, delay_s=1.0)
    >>> delays = sampler([late], seeds=[0], world_size=4, ranks_per_node=4, compute_s=np.ones(4)).take(2)
    >>> delays["host"].shape
    (1, 2, 4)
    >>> passes = sampler([late], seeds=[0], world_size=4, ranks_per_node=4, compute_s=np.ones(4), micro_batches=8)
    >>> passes.take(2)["host"].shape
    (1, 2, 8, 4)
    """
    sources = []
    for index, disturbance in enumerate(disturbances):
        if disturbance is None:
            continue
        everyone = disturbance.ranks is None and disturbance.nodes is None
        ranks = slice(None) if everyone else disturbance.selected(world_size, ranks_per_node)
        uniforms = _Uniforms([np.array([seed, index], dtype=np.uint64) for seed in seeds], world_size, ranks)
        sources.append(_Source(disturbance, uniforms, compute_s[ranks], seeds, ranks_per_node, micro_batches))
    return DelaySampler(sources, world_size=world_size, n_seeds=len(seeds), micro_batches=micro_batches)


@final
class DelaySampler:
    """Delays in consecutive chunks of steps. Made by `sampler`."""

    def __init__(self, sources: Sequence["_Source"], *, world_size: int, n_seeds: int, micro_batches: int) -> None:
        """Start at step 0."""
        self._sources = sources
        self._micro_batches = micro_batches
        self._world_size = world_size
        self._n_seeds = n_seeds
        self._next_step = 0

    @property
    def channels(self) -> frozenset[Channel]:
        """Channels that a disturbance acts on."""
        return frozenset(source.channel for source in self._sources)

    def take(self, n_steps: int) -> dict[Channel, _Floats]:
        """Return the delays of the next `n_steps` steps: seconds by channel, see `simdist.plan.delays`.

        In memory the seeds stay side by side: engines work step by step, on all ranks and seeds at once.

        Raises:
            ScenarioError: A recording ends before.
        """
        shape = (self._world_size, self._n_seeds)
        delays = {
            channel: np.zeros((n_steps, _n_parts(channel, self._micro_batches), *shape))
            for channel in sorted(self.channels)
        }
        first = self._next_step
        self._next_step = self._next_step + n_steps
        for start, stop in self._batches(first, self._next_step):
            for source in self._sources:
                delays[source.channel][start - first : stop - first, :, source.ranks] += source.delays(start, stop)
        of_seeds = {channel: np.moveaxis(seconds, 3, 0) for channel, seconds in delays.items()}
        return {channel: each[:, :, 0] if each.shape[2] == 1 else each for channel, each in of_seeds.items()}

    def _batches(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Split steps at borders of tiles, so that no tile is computed twice."""
        n_values = self._world_size * max(1, self._n_seeds) * self._micro_batches
        n_tiles = max(1, _BATCH_SIZE // (_TILE_STEPS * n_values))
        size = n_tiles * _TILE_STEPS
        while first < stop:
            end = min(stop, (first // size + 1) * size)
            yield first, end
            first = end


@dataclass(frozen=True, slots=True)
class _Uniforms:
    """The uniform numbers of one disturbance."""

    keys: Sequence[_Words]
    world_size: int
    ranks: slice | NDArray[np.int64]

    def closed(self, start: int, stop: int, *, lane: int = 0, what: int = _DELAY) -> _Floats:
        """Return multiples of 2^-53 in [0, 1), shape `[n_steps, n_ranks, n_seeds]`."""
        return (self._words(start, stop, lane, what) >> _UNUSED_BITS).astype(np.float64) * 2.0**-53

    def inner(self, start: int, stop: int, *, lane: int = 0) -> _Floats:
        """Return odd multiples of 2^-53: never 0 or 1, and symmetrical about 1/2."""
        return ((self._words(start, stop, lane, _DELAY) >> _UNUSED_BITS) | _ONE).astype(np.float64) * 2.0**-53

    def _words(self, start: int, stop: int, lane: int, what: int) -> _Words:
        """Return the words of the selected ranks, from a draw of the ranks from the first to the last of them."""
        chosen = np.arange(self.world_size)[self.ranks]
        first_rank = int(chosen.min(initial=self.world_size))
        n_ranks = int(chosen.max(initial=first_rank - 1)) + 1 - first_rank
        first_tile = start // _TILE_STEPS
        last_tile = (stop - 1) // _TILE_STEPS
        n_tiles = last_tile - first_tile + 1
        words = np.empty((n_tiles, _TILE_STEPS, n_ranks, len(self.keys)), dtype=np.uint64)
        counter = np.array([first_rank * _TILE_STEPS // _WORDS_AT_ONCE, first_tile, lane, what], dtype=np.uint64)
        n_words = _TILE_STEPS * n_ranks
        for i, key in enumerate(self.keys):
            generator = Philox(key=key, counter=counter)
            for tile in range(n_tiles):
                raw = generator.random_raw(n_words)
                words[tile, :, :, i] = raw.reshape(n_ranks, _TILE_STEPS).T
                generator.advance(2**64 - n_words // _WORDS_AT_ONCE)  # to the next tile: faster than a new generator
        steps = words.reshape(n_tiles * _TILE_STEPS, n_ranks, len(self.keys))
        offset = start - first_tile * _TILE_STEPS
        places = self.ranks if isinstance(self.ranks, slice) else chosen - first_rank
        return steps[offset : offset + stop - start, places]


@dataclass(frozen=True, slots=True)
class _Draws:
    """Steps of a run, as the disturbances of users see them: see `simdist.scenario.disturbances.Draws`."""

    start: int
    stop: int
    ranks: NDArray[np.int64]
    ranks_per_node: int
    compute_s: _Floats
    micro_batches: int
    numbers: _Uniforms

    def uniforms(self, lane: int = 0, *, start: int | None = None) -> _Floats:
        first = self.start if start is None else start
        if not 0 <= first < self.stop or lane < 0:
            raise ScenarioError(
                f"uniforms(lane={lane}, start={first}): write a step from 0 to {self.stop - 1} and a lane of 0 or more"
            )
        return self.numbers.inner(first, self.stop, lane=lane)


class _Source:
    """One disturbance on the ranks that it selects."""

    def __init__(
        self,
        disturbance: Disturbance,
        uniforms: _Uniforms,
        compute_s: _Floats,
        seeds: Sequence[int],
        ranks_per_node: int,
        micro_batches: int,
    ) -> None:
        self.channel = disturbance.on
        self.ranks = uniforms.ranks
        self._disturbance = disturbance
        self._uniforms = uniforms
        self._compute_s = compute_s
        self._seeds = seeds
        self._ranks_per_node = ranks_per_node
        self._n_parts = _n_parts(disturbance.on, micro_batches)
        self._bursting: NDArray[np.bool_] | None = None
        self._agrees = False
        self._by_kind = _pausing_working_or_playing(disturbance, uniforms, compute_s, micro_batches, seeds)

    def delays(self, start: int, stop: int) -> _Floats:
        """Return the seconds of some steps, broadcastable to `[n_steps, n_parts, n_ranks, n_seeds]`."""
        uniforms = self._uniforms
        match self._disturbance:
            case kinds.Transient(probability=probability, delay_s=delay_s):
                return self._once(np.where(uniforms.closed(start, stop) < probability, delay_s, 0.0), start, stop)
            case kinds.Persistent(factor=factor, delay_s=delay_s, sets_in=sets_in):
                late_s = self._compute_s * ((factor or 1.0) - 1.0) + (delay_s or 0.0)
                return self._evenly(late_s[:, np.newaxis] * _grown(sets_in, start, stop))
            case kinds.Jitter() | kinds.Exponential() as noise:
                lanes = range(self._n_parts)
                return np.stack([_continuous(noise, uniforms, start, stop, lane) for lane in lanes], 1) / self._n_parts
            case kinds.HeavyTail() as rare:
                return self._once(_continuous(rare, uniforms, start, stop), start, stop)
            case kinds.Bursts(delay_s=delay_s) as bursts:
                return self._evenly(np.where(self._walk(bursts, start, stop), delay_s, 0.0))
            case kinds.Pauses() | kinds.UnevenWork() | kinds.Recorded():
                return self._pause_work_or_play(start, stop)
            case kinds.Drawn() as drawn:
                return self._once(self._drawn(drawn, start, stop), start, stop)
            case kinds.Interference(lost=lost, noise=noise):
                assert lost is not None, "lost_share tells it"
                lost_s = lost * self._compute_s[:, np.newaxis]
                shares = kinds.Exponential(mean_s=noise / kinds.mean_of_longest(self._ranks_per_node))
                return self._evenly(lost_s * (1.0 - noise + _continuous(shares, uniforms, start, stop)))
            case kinds.CustomDisturbance() as custom:
                return self._custom(custom, start, stop)
            case unknown:
                assert_never(unknown)

    def _once(self, seconds: _Floats, start: int, stop: int) -> _Floats:
        """Let what is drawn for a step, `[n_steps, n_ranks, n_seeds]`, fall into one micro-batch."""
        if self._n_parts == 1:
            return seconds[:, np.newaxis]
        parts = np.arange(self._n_parts).reshape(-1, 1, 1)
        place = np.zeros((1, 1, 1))
        if self._disturbance.falls_anywhere:
            place = np.floor(self._uniforms.closed(start, stop, what=_PLACE) * self._n_parts)
        return np.where(place[:, np.newaxis] == parts, seconds[:, np.newaxis], 0.0)

    def _evenly(self, seconds: _Floats) -> _Floats:
        """Spread what lasts a whole step, `[n_steps, n_ranks, n_seeds]`, over its micro-batches."""
        return seconds[:, np.newaxis] / self._n_parts

    def _pause_work_or_play(self, start: int, stop: int) -> _Floats:
        from simdist.scenario.pauses_and_work import Pausing

        assert self._by_kind is not None
        found_s = self._by_kind.delays(start, stop)
        if isinstance(self._by_kind, Pausing):
            return self._once(found_s, start, stop)
        return found_s if found_s.shape[1] == self._n_parts else found_s.sum(axis=1, keepdims=True)

    def _custom(self, disturbance: kinds.CustomDisturbance, start: int, stop: int) -> _Floats:
        world = np.arange(self._uniforms.world_size)
        ranks = world[self.ranks]
        what = f"{disturbance.kind}: delays_s"

        def of_steps(stop: int) -> object:
            draws = _Draws(start, stop, ranks, self._ranks_per_node, self._compute_s, self._n_parts, self._uniforms)
            return disturbance.delays_s(draws)

        self._check_agrees(what, lambda: of_steps(min(stop, start + _COMPARED_STEPS)))
        returned = np.asarray(of_steps(stop))
        if returned.ndim == 4:
            return self._checked(returned, what, (stop - start, self._n_parts, len(ranks)))
        return self._once(self._checked(returned, what, (stop - start, len(ranks))), start, stop)

    def _drawn(self, disturbance: kinds.Drawn, start: int, stop: int) -> _Floats:
        if disturbance.quantile is None:
            values = np.array(disturbance.values)
            return np.asarray(values[(self._uniforms.closed(start, stop) * len(values)).astype(np.int64)])
        uniforms = self._uniforms.inner(start, stop)
        quantile = disturbance.quantile
        self._check_agrees("drawn: quantile", lambda: quantile(uniforms[:_COMPARED_STEPS]))
        return self._checked(quantile(uniforms), "drawn: quantile", (stop - start, uniforms.shape[1]))

    def _check_agrees(self, what: str, delays: Callable[[], object]) -> None:
        """Refuse code of a user with random numbers of its own: its delays would not follow from the seed."""
        if self._agrees:
            return
        try:
            one, two = (np.asarray(delays()) for _ in range(2))
        except Exception as error:  # whatever the code of a user raises
            raise ScenarioError(f"disturbance {what} fails: {type(error).__name__}: {error}") from error
        if not np.array_equal(one, two):
            raise ScenarioError(
                f"disturbance {what} returns other delays for the same numbers: draw none of its own; those that it is "
                f"given are random, as in lambda u: -0.05 * np.log(u)"
            )
        self._agrees = True

    def _checked(self, returned: object, what: str, shape: tuple[int, ...]) -> _Floats:
        """Return delays that code of a user has returned, `[n_steps, n_ranks, n_seeds]` or with micro-batches."""
        shape = (*shape, len(self._seeds))
        found = np.asarray(returned)
        try:
            found_s = np.broadcast_to(found, shape).astype(np.float64)
        except ValueError:
            axes = "steps, ranks and seeds" if len(shape) == 3 else "steps, micro-batches, ranks and seeds"
            raise ScenarioError(
                f"disturbance {what} returns {found.dtype} {list(found.shape)}: return seconds "
                f"that broadcast to {list(shape)}, {axes}"
            ) from None
        if not (np.isfinite(found_s).all() and (found_s >= 0).all()):
            wrong = found_s[~(np.isfinite(found_s) & (found_s >= 0))][0]
            raise ScenarioError(f"disturbance {what} returns {wrong:g} s: return seconds, finite and 0 or more")
        return found_s

    def _walk(self, bursts: kinds.Bursts, start: int, stop: int) -> NDArray[np.bool_]:
        """Walk the chains of all ranks on by some steps; return who is on."""
        draws = self._uniforms.closed(start, stop)
        on = np.empty(draws.shape, dtype=np.bool_)
        for step in range(stop - start):
            if self._bursting is None:
                self._bursting = draws[step] < bursts.enter / (bursts.enter + bursts.leave)
            else:
                self._bursting = draws[step] < np.where(self._bursting, 1.0 - bursts.leave, bursts.enter)
            on[step] = self._bursting
        return on


class _Playing:
    """A recording that is played."""

    def __init__(self, recorded: kinds.Recorded, uniforms: _Uniforms, seeds: Sequence[int], n_parts: int) -> None:
        self._recorded = recorded
        self._ranks = uniforms.ranks
        self._seeds = seeds
        self._table_s = _recorded_s(recorded, n_parts)
        self._played = _played_ranks(self._table_s, seeds, uniforms.world_size)

    def delays(self, start: int, stop: int) -> _Floats:
        """Return the seconds of some steps, `[n_steps, n_parts, n_ranks, n_seeds]`."""
        recorded = self._recorded
        n_recorded = len(self._table_s)
        if recorded.resample_steps is not None:
            steps = [resampled_steps(seed, n_recorded, recorded.resample_steps, start, stop) for seed in self._seeds]
        elif stop > n_recorded:
            raise ScenarioError(f"{recorded.file} ends before step {stop}: record as many steps as the run has")
        else:
            steps = [np.arange(start, stop)] * len(self._seeds)
        if self._played is None:
            return np.moveaxis(self._table_s[:, :, self._ranks][np.array(steps)], 0, 3)
        of_seeds = zip(self._played, steps, strict=True)
        played_s = [self._table_s[each.rows(rows, n_recorded), :, each.recorded] for each, rows in of_seeds]
        return np.moveaxis(np.stack(played_s, axis=3), 1, 2)[:, :, self._ranks]


def _n_parts(channel: Channel, micro_batches: int) -> int:
    """Return how many delays of a channel a step has."""
    return 1 if channel == "io" else micro_batches


def _recorded_s(recorded: kinds.Recorded, n_parts: int) -> _Floats:
    """Return a recording, `[n_steps, n_parts, n_ranks]`."""
    found = read_recorded(recorded)
    if found.ndim == 2:
        return of_micro_batches(recorded.on, found, n_parts).reshape(len(found), n_parts, -1)
    return found if found.shape[1] == n_parts else found.sum(axis=1, keepdims=True)


def _played_ranks(table: _Floats, seeds: Sequence[int], world_size: int) -> "list[PlayedRanks] | None":
    """Return the recorded ranks that a run of another number of ranks plays with each seed."""
    from simdist.scenario.other_ranks import played_by_seed

    return played_by_seed(table, seeds, world_size)


def _pausing_working_or_playing(
    disturbance: Disturbance, uniforms: _Uniforms, compute_s: _Floats, micro_batches: int, seeds: Sequence[int]
) -> "Pausing | Working | _Playing | None":
    """Return what draws pauses or work or plays recordings, which few scenarios have."""
    if isinstance(disturbance, kinds.Recorded):
        return _Playing(disturbance, uniforms, seeds, _n_parts(disturbance.on, micro_batches))
    if not isinstance(disturbance, kinds.Pauses | kinds.UnevenWork):
        return None
    from simdist.scenario.pauses_and_work import Pausing, Working

    if isinstance(disturbance, kinds.Pauses):
        return Pausing(disturbance, uniforms)
    return Working(disturbance, uniforms, compute_s, micro_batches, seeds)


def _grown(sets_in: tuple[int, int] | None, start: int, stop: int) -> _Floats:
    """Return the share of a delay that has set in, `[n_steps, 1, 1]`; `[1, 1, 1]` if it was there from the start."""
    if sets_in is None:
        return np.ones((1, 1, 1))
    begin, end = sets_in
    steps = np.arange(start, stop, dtype=np.float64).reshape(-1, 1, 1)
    if begin == end:
        return (steps >= begin).astype(np.float64)
    return np.clip((steps - begin) / (end - begin), 0.0, 1.0)


def _continuous(disturbance: kinds.Continuous, uniforms: _Uniforms, start: int, stop: int, lane: int = 0) -> _Floats:
    from simdist.scenario.portable import exp, log, normal_quantile

    drawn = uniforms.inner(start, stop, lane=lane)
    match disturbance:
        case kinds.Jitter(median_s=median_s, sigma=sigma):
            return median_s * exp(sigma * normal_quantile(drawn))
        case kinds.Exponential(mean_s=mean_s):
            return -mean_s * log(drawn)
        case kinds.HeavyTail(scale_s=scale_s, shape=shape, probability=probability):
            size_s = scale_s * exp(log(drawn) / -shape)
            return np.where(uniforms.closed(start, stop, lane=1) < probability, size_s, 0.0)
        case unknown:
            assert_never(unknown)


def resampled_steps(seed: int, n_recorded: int, block_steps: int, start: int, stop: int) -> NDArray[np.int64]:
    """Return which recorded step each step of a run is that is put together from blocks of them.

    Args:
        seed: Of the run.
        n_recorded: Steps of the recording.
        block_steps: Consecutive steps of a block; blocks begin with equal probability at any recorded step.
        start: First step asked for.
        stop: Step after the last one.

    Returns:
        int64 `[stop - start]`, from 0 to `n_recorded - 1`.
    """
    blocks, offsets = np.divmod(np.arange(start, stop), block_steps)
    first_tile = int(blocks[0]) // _TILE_STEPS
    last_tile = int(blocks[-1]) // _TILE_STEPS
    key = np.array([seed, _RESAMPLING], dtype=np.uint64)
    words = np.concatenate(
        [
            Philox(key=key, counter=np.array([0, tile, 0, 0], dtype=np.uint64)).random_raw(_TILE_STEPS)
            for tile in range(first_tile, last_tile + 1)
        ]
    )
    uniforms = (words >> _UNUSED_BITS).astype(np.float64) * 2.0**-53
    firsts = (uniforms * n_recorded).astype(np.int64)
    return np.asarray((firsts[blocks - first_tile * _TILE_STEPS] + offsets) % n_recorded)
