"""What `simdist whatif` prints as JSON."""

from dataclasses import asdict

from simdist.whatif.gains import Gain, Gains
from simdist.whatif.pattern import Pattern
from simdist.whatif.slowdown import Slowdown


def slowdown_document(found: Slowdown, spread: Pattern) -> dict[str, object]:
    """Return the analysis of a job; seconds are per step unless they are of one step."""
    lost_s = (found.rank_slowdowns - 1) * found.ideal_s
    node_lost_s = (found.node_slowdowns - 1) * found.ideal_s
    return {
        "world_size": found.world_size,
        "first_step": found.first_step,
        "steps": found.n_steps,
        "slowdown": found.slowdown,
        "lost_share": found.lost_share,
        "traced_s": found.traced_s,
        "replayed_s": found.replayed_s,
        "explained_s": found.explained_s,
        "ideal_s": found.ideal_s,
        "pattern": asdict(spread),
        "kinds": [asdict(part) for part in found.kinds],
        "channels": [
            {"channel": each.channel, "slowdown": each.slowdown, "lost_s": each.lost_s} for each in found.channels
        ],
        "ranks": [
            {"rank": rank, "node": rank // found.ranks_per_node, "slowdown": float(slowdown), "lost_s": float(lost)}
            for rank, (slowdown, lost) in enumerate(zip(found.rank_slowdowns, lost_s, strict=True))
        ],
        "nodes": [
            {"node": node, "slowdown": float(slowdown), "lost_s": float(lost)}
            for node, (slowdown, lost) in enumerate(zip(found.node_slowdowns, node_lost_s, strict=True))
        ],
        "by_step": [
            {
                "step": found.first_step + step,
                "step_s": float(found.step_s[step]),
                "ideal_s": float(found.ideal_step_s[step]),
                "slowdown": float(found.step_slowdowns[step]),
                "slowest_rank": int(found.rank_step_s[step].argmax()),
            }
            for step in range(found.n_steps)
        ],
        "slowest_ranks": list(found.slowest_ranks),
        "fixed_by_ranks": found.fixed_by_ranks,
        "slowest_node": found.slowest_node,
        "fixed_by_node": found.fixed_by_node,
    }


def gains_document(compared: Gains) -> dict[str, object]:
    """Return what other schedules would gain."""
    best, fastest = compared.best, compared.fastest
    return {
        "baseline": compared.baseline,
        "baseline_step_s": compared.baseline_step_s,
        "drawn": compared.drawn,
        "runs": compared.n_runs,
        "steps": compared.n_steps,
        "recorded_steps": compared.recording.n_steps if compared.recording else None,
        "block_steps": compared.recording.block_steps if compared.recording else None,
        "rows": [_gain_document(row) for row in compared.rows],
        "fastest": fastest.schedule if fastest else None,
        "best": best.schedule if best else None,
    }


def _gain_document(row: Gain) -> dict[str, object]:
    return {
        "schedule": row.schedule,
        "step_s": row.step_s,
        "speedup": row.speedup,
        "speedup_95": list(row.interval) if row.interval else None,
        "is_sure": row.is_sure,
        "problem": row.problem,
        "engine": row.engine,
    }
