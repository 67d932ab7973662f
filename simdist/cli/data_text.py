"""What `simdist data` prints for people."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from simdist.cli.tables import seconds_in_state, table_text
from simdist.plan import LEVELS
from simdist.scenario.cluster import Storage
from simdist.settings.units import format_Bps, format_nbytes
from simdist.studies.data_knobs import KnobEffect, KnobEffects
from simdist.studies.epochs import HIDDEN_SHARE, Epoch, EpochError, Epochs
from simdist.studies.limits import LIMITS, EpochLimits

EpochT = TypeVar("EpochT")

_ROUNDING = 0.0005  # prints as 0.0 %
_MOST_EPOCHS = 6  # lines of a table; JSON has all


def shown_epochs(epochs: Sequence[EpochT]) -> list[EpochT | None]:
    """Return those of many that a table shows: the first ones and the last; None stands for the others."""
    if len(epochs) <= _MOST_EPOCHS:
        return list(epochs)
    return [*epochs[: _MOST_EPOCHS - 1], None, epochs[-1]]


def percent(share: float, *, signed: bool = False) -> str:
    """Print a share.

    >>> percent(0.0213), percent(-1e-9), percent(0.5, signed=True), percent(float("nan"))
    ('2.1 %', '0 %', '+50.0 %', '-')
    """
    if math.isnan(share):
        return "-"
    return f"{100 * share:{'+' if signed else ''}.1f} %" if abs(share) >= _ROUNDING else "0 %"


def epochs_text(found: Epochs) -> str:
    """Return the epochs of one trace."""
    header = ("epoch", "time", "step", "stall per step", "share", "mean of ranks", *LEVELS)
    rows = [_gap(header) if each is None else _cells(each) for each in shown_epochs(found.epochs)]
    return "\n".join([table_text(_TITLE, header, rows, words=("epoch",)), *_sentences(found)])


_TITLE = "stall: for want of a batch, of the slowest rank; samples (bytes) by level"


def _gap(header: Sequence[str]) -> list[str]:
    return ["...", *[""] * (len(header) - 1)]


def _cells(epoch: Epoch) -> list[str]:
    return [
        str(epoch.number),
        seconds_in_state(epoch.seconds),
        seconds_in_state(epoch.seconds / epoch.n_steps),
        seconds_in_state(epoch.stall_s / epoch.n_steps),
        percent(epoch.stall_share),
        seconds_in_state(epoch.mean_stall_s / epoch.n_steps),
        *_by_level(epoch),
    ]


def _by_level(epoch: Epoch) -> Iterator[str]:
    for n_samples, nbytes in zip(epoch.n_samples, epoch.nbytes, strict=True):
        yield f"{n_samples:,} ({format_nbytes(nbytes)})" if n_samples else "-"


def _sentences(found: Epochs) -> Iterator[str]:
    if found.staging_s:
        yield f"staging in: {seconds_in_state(found.staging_s)} before the first epoch"
    hidden = [each.number for each in found.epochs if each.is_hidden]
    seen = [each.number for each in found.epochs if not each.is_hidden]
    if not found.epochs:
        yield "no epoch: no step was finished by all ranks"
    elif not seen:
        yield f"compute hides the loading: stalls are less than {100 * HIDDEN_SHARE:g} % of every epoch"
    elif not hidden:
        yield f"compute does not hide the loading: stalls are {100 * HIDDEN_SHARE:g} % or more of every epoch"
    else:
        yield f"compute hides the loading in {_numbers(hidden)}, but not in {_numbers(seen)}"


def _numbers(epochs: Sequence[int]) -> str:
    """Print numbers of epochs, neighbours as a range.

    >>> _numbers([0]), _numbers([1, 2, 3, 7])
    ('epoch 0', 'epochs 1-3, 7')
    """
    ranges: list[list[int]] = []
    for number in epochs:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return f"epoch{'s' * (len(epochs) > 1)} {', '.join('-'.join(map(str, each)) for each in ranges)}"


def both_text(simulated: Epochs, measured: Epochs, errors: Sequence[EpochError]) -> str:
    """Return the epochs of a simulation and of a measurement side by side."""
    header = ("epoch", "simulated", "measured", "error", "stall per step, simulated", "measured", *LEVELS)
    lines = [
        [
            str(error.epoch),
            seconds_in_state(error.simulated_s),
            seconds_in_state(error.measured_s),
            percent(error.error, signed=True),
            seconds_in_state(ours.stall_s / ours.n_steps),
            seconds_in_state(theirs.stall_s / theirs.n_steps),
            *_by_level(theirs),
        ]
        for error, ours, theirs in zip(errors, simulated.epochs, measured.epochs, strict=True)
    ]
    rows = [_gap(header) if each is None else each for each in shown_epochs(lines)]
    table = table_text("times of epochs; samples (bytes) by level as measured", header, rows, words=("epoch",))
    staging = (seconds_in_state(each.staging_s) for each in (simulated, measured))
    staged = "staging in: simulated {}, measured {}".format(*staging)
    return "\n".join([table, *([staged] if simulated.staging_s or measured.staging_s else []), errors_text(errors)])


def errors_text(errors: Sequence[EpochError]) -> str:
    """Return how far epochs are from those measured, in a sentence."""
    found = sorted((each.error for each in errors if not math.isnan(each.error)), key=abs)
    if not found:
        return "error of an epoch: none was finished"
    middle = (abs(found[(len(found) - 1) // 2]) + abs(found[len(found) // 2])) / 2
    return f"error of an epoch: median {percent(middle)}, worst {percent(found[-1], signed=True)}"


def limits_text(least: Sequence[EpochLimits], simulated: Epochs, storage: Storage | None) -> str:
    """Return what epochs take at least, by what limits them, beside what they take; and what storage would have to do.

    Args:
        least: Of staging and epochs.
        simulated: The epochs.
        storage: What the epochs read from.
    """
    names = [name for name in LIMITS if any(each.seconds[name] for each in least)]
    header = ("epoch", "simulated", "at least", "for", *names)
    seconds: dict[int | None, float] = {each.number: each.seconds for each in simulated.epochs}
    seconds[None] = simulated.staging_s
    shown = shown_epochs([each for each in least if each.epoch in seconds])
    rows = [_gap(header) if each is None else _limit_cells(each, seconds[each.epoch], names) for each in shown]
    title = "limits: what an epoch would take if all but one were free"
    table = table_text(title, header, rows, words=("epoch", "for"))
    return "\n".join([table, *_needs(least, storage)])


def _limit_cells(each: EpochLimits, seconds: float, names: Sequence[str]) -> list[str]:
    epoch = "staging" if each.epoch is None else str(each.epoch)
    by_limit = (seconds_in_state(each.seconds[name]) if each.seconds[name] else "-" for name in names)
    return [epoch, seconds_in_state(seconds), seconds_in_state(each.least_s), each.name, *by_limit]


def _needs(least: Sequence[EpochLimits], storage: Storage | None) -> Iterator[str]:
    """Yield what storage has to deliver in the epoch that asks most of it."""
    needs = [(Bps, each.epoch) for each in least if each.epoch is not None and (Bps := each.needed_Bps)]
    if needs and storage:
        needed_Bps, epoch = max(needs, key=lambda each: float(f"{each[0]:.2e}"))  # the first of those that print alike
        would = "has" if needed_Bps <= storage.bandwidth_Bps else "would have"
        sentence = f"storage {would} to deliver {format_Bps(needed_Bps)} for computing to hide it in epoch {epoch}"
        yield f"{sentence}; its bandwidth is {format_Bps(storage.bandwidth_Bps)}"


def knobs_text(found: KnobEffects) -> str:
    """Return what knobs do to the waiting for data, by epoch and in all."""
    numbers = [each.number for each in found.baseline.epochs]
    shown = shown_epochs(numbers)
    header = ("change", "run", "waiting", "removed", *("..." if n is None else f"epoch {n}" for n in shown))
    now = found.baseline
    blank = [""] * (1 + len(shown))
    lines = [
        ["as it is", seconds_in_state(now.seconds), seconds_in_state(now.waiting_s), *blank],
        *(_effect_cells(each, shown) for each in found.effects),
    ]
    title = "one change at a time; waiting: staging and stalls"
    table = table_text(title, header, lines, words=("change",))
    return "\n".join([table, *(f"{name}: not simulated, needs {what}" for name, what in found.missing.items())])


def _effect_cells(each: KnobEffect, shown: Sequence[int | None]) -> list[str]:
    waiting_s = each.staging_s + sum(each.stall_s)
    epochs = ("" if n is None else _removed(each.removed_by_epoch[n]) for n in shown)
    return [each.knob, seconds_in_state(each.seconds), seconds_in_state(waiting_s), _removed(each.removed), *epochs]


def _removed(share: float) -> str:
    return "more than twice" if share < -1 else percent(share)
