"""A stand-in for `python -m real.learn`: curves with known answers, by the label of the plan's schedule.

The accuracy after n steps is 1 - exp(-n f / tau), with tau of the schedule, a little more by seed, and the factor f of
the learning rate up to 2, beyond which nothing is learnt, and beyond 8 it diverges. Environment variables: LEARNER_TAU,
JSON of label -> tau; LEARNER_HANG, a label that hangs; LEARNER_LOG, a file that gets a line per run.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

COMMAND = (sys.executable, __file__)
TENSORS = [["weight", [30, 10], "float32"], ["bias", [10], "float32"]]


def more_tau(seed: int) -> float:
    """Return what a seed adds to tau, from 0 to 0.4."""
    return seed % 5 / 10


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    if "describe" in request:
        if request["task"] == "broken":
            say(error="task broken: it has no parameters")
            sys.exit(2)
        say(tensors=TENSORS, metrics=["accuracy"], rank_nbytes=1000, process_nbytes=10**6)
        return
    plan = json.loads(Path(request["plan"]).read_text())
    n_steps = sum(run["times"] * len(run["bodies"]) for run in plan["order"])
    label, seed, lr_factor = plan["name"], request["seed"], request["lr_factor"]
    if log := os.environ.get("LEARNER_LOG"):
        with Path(log).open("a") as file:
            file.write(json.dumps({"label": label, "steps": n_steps, **request}) + "\n")
    say(ranks=plan["world_size"], memory_nbytes=1)
    say(batched=True, why=None)
    taus = json.loads(os.environ.get("LEARNER_TAU", "{}"))
    tau = taus.get(label, 20.0) + more_tau(seed)
    rate = lr_factor if lr_factor <= 2 else 0.0
    evaluated = sorted({*range(0, n_steps + 1, request["evaluate_every"]), n_steps})
    for last, step in zip([0, *evaluated], evaluated, strict=False):
        accuracy = 1 - math.exp(-step * rate / tau)
        losses = [math.exp(-each * rate / tau) for each in range(last, step)]
        value = {"accuracy": accuracy}
        if lr_factor > 8 and step > 3:
            say(error="the loss is nan", diverged=True)
            sys.exit(1)
        say(
            step=step,
            losses=losses,
            rank0=value,
            average=value,
            drift=0.5,
            noise_scale=100.0,
            curvature=4.0,
            ranks={"accuracy": [accuracy - 0.01, accuracy]},
        )
        if label == os.environ.get("LEARNER_HANG"):
            time.sleep(60)
    say(done=True)


def say(**line: object) -> None:
    """Write a line."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
