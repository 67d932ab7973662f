"""Reading many traces at once, each in a process of its own."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from pathlib import Path
from typing import TypeAlias

from simdist.errors import TraceError
from simdist.profiles.steps.model import RankProfile
from simdist.profiles.steps.ranks import profile_rank
from simdist.sweep.workers import LocalPool, n_cores

_LITTLE_NBYTES = 16 << 20  # read in about the second that a process takes to start, if it is not compressed

Outcome: TypeAlias = RankProfile | TraceError
"""What became of a file: what it tells, or why it could not be read."""


def profile_all(
    paths: Sequence[Path],
    *,
    n_workers: int | None = None,
    reading: Callable[[Path], RankProfile] = profile_rank,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Read trace files; a file that cannot be read costs no other.

    Args:
        paths: The files.
        n_workers: Processes; None takes one per core, or none if there is so little to read that their start would take
            longer. With one, or for one file, this process reads.
        reading: What reads one; a function that processes can import.
        progress: Is told how many files are done, and of how many.

    Returns:
        What became of each file, in the order of `paths`.

    Raises:
        RunError: No process can be started.
    """
    n_workers = min(n_workers or _usual(paths), len(paths))
    finished = _here(paths, reading) if n_workers <= 1 else _elsewhere(paths, reading, n_workers)
    outcomes: dict[int, Outcome] = {}
    for number, outcome in finished:
        outcomes[number] = outcome
        if progress:
            progress(len(outcomes), len(paths))
    return [outcomes[number] for number in range(len(paths))]


def _usual(paths: Sequence[Path]) -> int:
    nbytes = sum(path.stat().st_size for path in paths if path.is_file())
    return 1 if nbytes < _LITTLE_NBYTES else n_cores()


def _here(paths: Sequence[Path], reading: Callable[[Path], RankProfile]) -> Iterator[tuple[int, Outcome]]:
    for number, path in enumerate(paths):
        yield number, _outcome(reading, path)


def _elsewhere(
    paths: Sequence[Path], reading: Callable[[Path], RankProfile], n_workers: int
) -> Iterator[tuple[int, Outcome]]:
    """Read in processes, which get their next file when they are done with one: a dead one takes one file with it."""
    waiting = list(enumerate(paths))[::-1]
    underway: dict[Future[Outcome], int] = {}
    with LocalPool(n_workers) as pool:
        while waiting or underway:
            while waiting and len(underway) < n_workers:
                number, path = waiting.pop()
                underway[pool.executor.submit(_outcome, reading, path)] = number
            for done in wait(underway, return_when=FIRST_COMPLETED).done:
                number = underway.pop(done)
                yield number, _result(done, paths[number])


def _result(done: Future[Outcome], path: Path) -> Outcome:
    try:
        return done.result()
    except BrokenExecutor:
        return TraceError(f"{path}: the process that read it died, perhaps for want of memory; take fewer --workers")


def _outcome(reading: Callable[[Path], RankProfile], path: Path) -> Outcome:
    try:
        return reading(path)
    except TraceError as error:
        return error
    except MemoryError:
        return TraceError(f"{path}: not enough memory to read it; take fewer --workers")
