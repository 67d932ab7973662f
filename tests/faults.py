"""Faults of a machine, planted in the process of a rank at the moment when a file is written."""

import os
import sys
from pathlib import Path
from typing import Literal

from loops import checkpointing, fail, one_step
from scripts import ROOT, load_script
from trainings import Training

import real
from real.cli import main
from simdist.schedules import Sync

Fault = Literal["torn", "killed", "full"]
plant = load_script(ROOT / "experiments" / "fault_injections" / "job.py").plant_in_files


def perform(fault: Fault, name: str, *args: object) -> None:
    """Be `python -m real` with a fault on rank 0."""
    if os.environ["RANK"] == "0":
        plant(fault, name)
    sys.exit(main([str(arg) for arg in args]))


def train(files: dict[str, Path], ending: str = "", fault: Fault | None = None, name: str = "") -> None:
    """Be a training script with a fault, whose fourth step may raise, be killed or stop; print where it begins."""
    if fault:
        plant(fault, name)
    module, optimizer = Training().make()
    kept = checkpointing(files.get("checkpoint"), 2)
    experiment = real.Experiment(trace=files.get("trace"))
    with real.wrap(module, optimizer, Sync(), n_steps=6, checkpointing=kept, experiment=experiment) as worker:
        print(f"begins before step {worker.step}")
        for step in worker.steps():
            if step == 3:
                fail(ending)
            one_step(module, optimizer, step)
