"""`simdist whatif` of a table of operations."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.cli import common, losses
from simdist.cli.losses import LOST, SLOWDOWN, STEP_COLUMNS, slowest_text
from simdist.plan.text import ranks_named
from simdist.settings.units import format_seconds, format_share
from simdist.studies.columns import Column, factor
from simdist.whatif.job_slowdown import IdealCompute, JobSlowdown, find_job_slowdown
from simdist.whatif.table import read_table

_Record: TypeAlias = dict[str, Any]

_REPLAY_ERROR = 0.02  # of a step
_STAGE_COLUMNS = (Column("stage", form=str), SLOWDOWN, LOST)
_RANK_COLUMNS = (
    Column("rank", form=str),
    Column("dp_rank", form=str),
    Column("stage", form=str),
    SLOWDOWN,
    Column("alone", form=factor),
    LOST,
)


def show(session: common.Session, path: Path, *, steps: range | None, compute: IdealCompute) -> None:
    """Analyse a table of operations and print what was found.

    Raises:
        TraceError: The table cannot be read or replayed, or a row is wrong.
        UnsupportedError: A package is missing.
    """
    with session.bar() as bar:
        bar.update("read", 0, None)
        found = find_job_slowdown(
            read_table(path, steps=steps), compute=compute, progress=partial(bar.update, "replay")
        )
    for note in found.table.notes:
        session.say(f"warning: {path}: {note}")
    errors = np.abs(found.replayed_s / found.traced_s - 1)
    if errors.max() > _REPLAY_ERROR:
        worst = int(errors.argmax())
        n_off = int((errors > _REPLAY_ERROR).sum())
        session.say(
            f"warning: {path}: the replay is off by more than {format_share(_REPLAY_ERROR)} in {n_off:,} of "
            f"{len(errors):,} steps, most in step {found.table.step_numbers[worst]}, by "
            f"{format_share(float(errors[worst]))}: operations do not wait for each other as assumed"
        )
    document = _document(path, found, compute)
    session.result(document, "\n".join(_lines(document, found)))


def _records(**columns: NDArray[Any]) -> list[_Record]:
    return [
        dict(zip(columns, row, strict=True)) for row in zip(*(each.tolist() for each in columns.values()), strict=True)
    ]


def _document(path: Path, found: JobSlowdown, compute: IdealCompute) -> _Record:
    """Return all that was found; seconds are per step unless they are of one step.

    Columns:
        job (str): TABLE, as on the command line.
        world_size (int): Workers.
        data_parallel (int): Data-parallel ranks.
        pipeline_parallel (int): Stages.
        steps (int): Replayed steps.
        ideal_compute (str): Duration of computing that is ideal: `mean` or `median`.
        slowdown (float): `explained_s` / `ideal_s`.
        lost_share (float): Share of the time that stragglers cost.
        traced_s (float): As in the table.
        replayed_s (float): Replayed with everything in the table.
        explained_s (float): Replayed without the time between operations.
        ideal_s (float): The same, with ideal durations.
        kinds (list): "Cost of a kind of operation", most first. Both ends of transfers count together, as
            `forward-pp-comm` and `backward-pp-comm`.
        stages (list): Cost of each stage: `stage`, `slowdown`, `lost_s`.
        dp_ranks (list): Cost of each data-parallel rank: `dp_rank`, `slowdown`, `lost_s`.
        ranks (list): "Cost of a worker".
        by_step (list): "A step of a table", for every step.
        slowest_ranks (list): The 3 % of the workers (int) with the largest slowdown, at least one.
        fixed_by_ranks (float or null): Share of the loss that vanishes if these workers are ideal. `null` if nothing is
            lost.
        fixed_by_last_stage (float or null): Share of the loss that vanishes if the last stage is ideal. It may exceed
            1.
        notes (list): What was left out or assumed (str).

    Columns of ranks:
        rank (int): Rank.
        dp_rank (int): Its data-parallel rank.
        stage (int): Its stage.
        slowdown (float): The lower of the slowdowns of its data-parallel rank and its stage.
        alone (float): Slowdown if only this worker is as traced and all others are ideal.
        lost_s (float): What it alone adds to the ideal.

    Columns of by_step:
        step (int): Its number in the table.
        traced_s (float): Its time.
        replayed_s (float): Replayed.
        step_s (float): Replayed without the time between operations.
        ideal_s (float): Its ideal time.
        slowdown (float): `step_s` / `ideal_s`.
        slowest_rank (int): The worker that alone costs this step most.
    """
    table = found.table
    ideal_s = float(found.ideal_s.mean())
    ranks = found.table.ranks.ravel()
    n_dp_ranks, n_stages = table.ranks.shape
    stages = found.stage_slowdowns
    dp_ranks = found.dp_rank_slowdowns
    alone = found.alone_slowdowns
    return {
        "job": str(path),
        "world_size": table.n_workers,
        "data_parallel": n_dp_ranks,
        "pipeline_parallel": n_stages,
        "steps": len(table.step_numbers),
        "ideal_compute": compute,
        "slowdown": found.slowdown,
        "lost_share": 1 - 1 / found.slowdown,
        "traced_s": float(found.traced_s.mean()),
        "replayed_s": float(found.replayed_s.mean()),
        "explained_s": float(found.step_s.mean()),
        "ideal_s": ideal_s,
        "kinds": [asdict(part) for part in found.kinds],
        "stages": _records(stage=np.arange(n_stages), slowdown=stages, lost_s=(stages - 1) * ideal_s),
        "dp_ranks": _records(dp_rank=table.dp_ranks, slowdown=dp_ranks, lost_s=(dp_ranks - 1) * ideal_s),
        "ranks": _records(
            rank=ranks,
            dp_rank=np.repeat(table.dp_ranks, n_stages),
            stage=np.tile(np.arange(n_stages), n_dp_ranks),
            slowdown=found.worker_slowdowns,
            alone=alone,
            lost_s=(alone - 1) * ideal_s,
        ),
        "by_step": _records(
            step=table.step_numbers,
            traced_s=found.traced_s,
            replayed_s=found.replayed_s,
            step_s=found.step_s,
            ideal_s=found.ideal_s,
            slowdown=found.step_slowdowns,
            slowest_rank=ranks[found.worker_step_s.argmax(axis=1)],
        ),
        "slowest_ranks": ranks[list(found.slowest_workers)].tolist(),
        **common.picked(found, "fixed_by_last_stage", fixed_by_ranks="fixed_by_workers"),
        "notes": list(table.notes),
    }


def _lines(document: _Record, found: JobSlowdown) -> Iterator[str]:
    """Yield the analysis of a job."""
    table = found.table
    n_stages = document["pipeline_parallel"]
    first = table.step_numbers[0]
    last = table.step_numbers[-1]
    yield (
        f"{table.path.name}: {table.n_workers:,} ranks, data parallel {len(table.dp_ranks):,} x pipeline {n_stages:,}; "
        f"{document['steps']:,} steps of {first} to {last}"
    )
    yield losses.slowdown_line(found.slowdown, document["explained_s"], document["ideal_s"])
    traced_s = document["traced_s"]
    between = format_share(1 - document["explained_s"] / document["traced_s"])
    yield f"traced {format_seconds(traced_s)} per step, of which {between} is between operations; left out above"
    if found.fixed_by_workers is not None:
        ranks = ranks_named(tuple(document["slowest_ranks"]))
        text = f"would be gone: with {ranks} as fast as is typical, {format_share(found.fixed_by_workers)} of the loss"
        if n_stages > 1:
            text += f"; with the last stage, {format_share(found.fixed_by_last_stage or 0.0)}"
        yield text
    yield losses.slow_steps_line(found.step_slowdowns)
    yield from ("", losses.ALONE, "", losses.kinds_text(document["kinds"]))
    if n_stages > 1:
        yield from ("", slowest_text("stages", _STAGE_COLUMNS, document["stages"]))
    yield from ("", slowest_text("ranks", _RANK_COLUMNS, document["ranks"]))
    yield from ("", slowest_text("steps", STEP_COLUMNS, document["by_step"]))
