"""Delays on the stream of the device: how long they were to be, and how long they were.

One rank performs a plan whose computation is emulated, so that the delays alone are on trial. They are drawn over three
decades. A row per delay.
"""

import common


def run(part: common.Part) -> None:
    """Emit a row per delay."""
    import numpy as np

    from simdist.plan import Delay, occurrences

    document: common.Row = {
        "workload": {"preset": "mlp", "batch_size": 1, "forward": "1 ms", "backward": "2 ms", "optimize": "1 ms"},
        "disturbances": [{"kind": "jitter", "on": "compute", "median": "3 ms", "sigma": 1.5}],
        "schedules": [{"kind": "sync"}],
        "steps": 5 if part.dry_run else 200,
    }
    run, trace = common.performed(document, "--device", part.device, "--backend", "gloo")
    drawn_s = run.delays["compute"][0, :, 0]
    for each in occurrences(run.plan):
        if isinstance(each.op, Delay) and each.op.channel == "compute":
            spans_s = (trace.end_s - trace.start_s)[each.rows, 0]
            for step, seconds in zip(each.steps, spans_s, strict=True):
                part.emit(
                    {
                        "step": int(step),
                        "injected_ms": 1e3 * float(drawn_s[step]),
                        "measured_ms": 1e3 * float(np.round(seconds, 9)),
                    }
                )
