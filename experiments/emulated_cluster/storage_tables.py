"""The tables and sentences in which the README shows what `--study storage` found."""

from collections.abc import Iterator, Sequence
from statistics import median

from storage import KNOB_CASES, Case, Outage, Result, Shape

from simdist.plan import LEVELS


def summary(shape: Shape, results: Sequence[Result]) -> str:
    """Say in a line how well the epochs were predicted."""
    errors = {f"{each.case}, epoch {n}": epoch.error for each in results for n, epoch in enumerate(each.epochs)}
    worst = max(errors, key=lambda name: abs(errors[name]))
    reading = [each for each in results if any(map(sum, (epoch.predicted_hits for epoch in each.epochs)))]
    same = sum(not each.differences for each in reading)
    return (
        f"{shape.title}: epoch time error median {median(map(abs, errors.values())):.1%}, worst {errors[worst]:+.1%} "
        f"({worst}) of {len(errors)} epochs; samples from each level identical, load by load and rank by rank, in "
        f"{same} of {len(reading)} runs"
    )


def epoch_table(results: Sequence[Result]) -> Iterator[str]:
    """Yield every epoch of every policy, predicted and measured."""
    knobs = {case.name for case in KNOB_CASES}
    yield (
        f"| run | epoch | predicted, s | measured | error | of it stalls: predicted | measured | samples from "
        f"{' / '.join(LEVELS)}: predicted | measured |"
    )
    for each in (each for each in results if each.case not in knobs):
        if any(each.staging_s):
            predicted_s, measured_s = each.staging_s
            error = predicted_s / measured_s - 1
            yield f"| {each.case} | staging | {predicted_s:.2f} | {measured_s:.2f} | {error:+.1%} | | | | |"
        for number, epoch in enumerate(each.epochs):
            hits = (" / ".join(map(str, hits)) for hits in (epoch.predicted_hits, epoch.measured_hits))
            cells = [
                each.case,
                str(number),
                f"{epoch.predicted_s:.2f}",
                f"{epoch.measured_s:.2f}",
                f"{epoch.error:+.1%}",
                f"{epoch.predicted_stall_s:.2f}",
                f"{epoch.measured_stall_s:.2f}",
                *hits,
            ]
            yield f"| {' | '.join(cells)} |"


def knob_table(results: Sequence[Result]) -> Iterator[str]:
    """Yield what reading ahead and more readers take away from the stalls of a run."""
    names = [Case("naive").name, Case("files").name, *(case.name for case in KNOB_CASES)]
    yield "| run | predicted, s | measured | error | of it stalls: predicted | measured |"
    for each in sorted((each for each in results if each.case in names), key=lambda each: each.case):
        predicted_s, measured_s = (
            sum(seconds) for seconds in zip(*((e.predicted_s, e.measured_s) for e in each.epochs), strict=True)
        )
        stalls = f"{each.stall_s('predicted'):.2f} | {each.stall_s('measured'):.2f}"
        yield f"| {each.case} | {predicted_s:.2f} | {measured_s:.2f} | {predicted_s / measured_s - 1:+.1%} | {stalls} |"


def outage_line(outage: Outage) -> str:
    """Say what an outage did to a run."""
    first, *others = zip(outage.usual_s, (epoch.measured_s for epoch in outage.result.epochs), strict=True)
    same = "identical, load by load and rank by rank" if not outage.result.differences else "different"
    later = ", ".join(f"{away_s:.1f} s instead of {usual_s:.1f} s" for usual_s, away_s in others)
    return (
        f"`{outage.result.case}`, server away for {outage.away_s:g} s: the first epoch took {first[1]:.1f} s instead "
        f"of {first[0]:.1f} s, the others {later}; samples from each level {same}"
    )
