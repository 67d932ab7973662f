"""Training of plans in other processes by `python -m real.learn`, which reads a request and writes lines of JSON.

simdist knows only the input and output of that program. A hash of the inputs identifies a run: plan, task, seed and
settings. Other files that a task imports are not part of the hash.
"""

import hashlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

import numpy as np

from simdist import __version__
from simdist.errors import RunError, ScenarioError
from simdist.files import read_content, read_jsonl
from simdist.jobs import Workers, finished
from simdist.jobs.asking import ask, parse_lines
from simdist.jobs.store import DESIGN, ROWS, Store
from simdist.learning.curves import Curve
from simdist.plan import Plan
from simdist.plan.codec import dumps
from simdist.settings.units import format_nbytes, format_seconds

_COMMAND = (sys.executable, "-m", "real.learn")

_MOST_NAMED = 3  # failed runs
_FIELDS = [each.name for each in fields(Curve)]


@dataclass(frozen=True, slots=True)
class TaskSetting:
    """A task and its training settings.

    Args:
        name: Name of the task, or the path of its file.
        tensors: Name, shape and type of each parameter, in forward order.
        digest: Hash of its file, or its name.
        evaluate_every: Steps between evaluations.
        device: Device for training, `cpu` or `cuda`.
        time_limit_s: Seconds after which a run is ended.
        metrics: Names of its metrics.
        process_nbytes: Memory of a training process, without ranks.
        rank_nbytes: Memory of each rank, besides the buffers of the plan.
    """

    name: str
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    digest: str
    evaluate_every: int
    device: str = "cpu"
    time_limit_s: float = 3600.0
    metrics: tuple[str, ...] = ()
    process_nbytes: int = 0
    rank_nbytes: int = 0


@dataclass(frozen=True)
class Training:
    """A run to train.

    Args:
        label: Label of its schedule, for messages.
        plan: Plan with the tensors of the task.
        task: The task and its training settings.
        seed: Seed of the initial parameters and the order of samples.
        lr_factor: Factor of the task's learning rate.
        late: Late ranks by operation instance, if the plan drops late ranks.
    """

    label: str
    plan: Plan
    task: TaskSetting
    seed: int
    lr_factor: float = 1.0
    late: Mapping[int, Sequence[int]] | None = None

    @property
    def name(self) -> str:
        """Label and seed, for messages."""
        return f"{self.label}, seed {self.seed}"

    @property
    def nbytes(self) -> int:
        """Memory of the run."""
        of_rank = sum(each.nbytes for each in self.plan.buffers) + self.task.rank_nbytes
        return self.task.process_nbytes + self.plan.world_size * of_rank

    @property
    def key(self) -> str:
        """Hash of all inputs that determine its curve."""
        told = (__version__, self.plan.digest(), self.task.digest, *self.request().values())
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def request(self) -> dict[str, Any]:
        """Return the input of the program apart from the plan."""
        return {
            "task": self.task.name,
            "seed": self.seed,
            "evaluate_every": self.task.evaluate_every,
            "lr_factor": self.lr_factor,
            "late": self.late and {str(row): list(ranks) for row, ranks in sorted(self.late.items())},
            "device": self.task.device,
        }


def describe(name: str, evaluate_every: int, *, seed: int = 0, time_limit_s: float = 3600.0) -> TaskSetting:
    """Ask the training program for the tensors of a task.

    Args:
        name: Name of an included task, or the path of a file.
        evaluate_every: See `TaskSetting`.
        seed: Seed of its data.
        time_limit_s: See `TaskSetting`. It also limits the wait for the answer.

    Raises:
        ScenarioError: There is no such task, or something is wrong with it.
        RunError: The program fails.
    """
    path = Path(name)
    digest = hashlib.sha256(read_content(path)).hexdigest() if path.is_file() else name
    full = str(path.resolve()) if path.is_file() else name
    request = {"describe": True, "task": full, "seed": seed}
    *_, found = _asked(request, what=f"--task {name}", time_limit_s=time_limit_s, shows_output=True)
    tensors = tuple((name, tuple(shape), dtype) for name, shape, dtype in found["tensors"])
    its = {name: found[name] for name in ("process_nbytes", "rank_nbytes")} | {"metrics": tuple(found["metrics"])}
    return TaskSetting(full, tensors, digest, evaluate_every, time_limit_s=time_limit_s, **its)


def train(run: Training) -> Curve:
    """Train a run in a process of its own. If it diverges, its values are NaN from then on.

    Raises:
        ScenarioError: The program refuses the task or the plan.
        RunError: The run fails, or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(dumps(run.plan), encoding="utf-8")
        request = {"plan": str(path), **run.request()}
        lines = _asked(request, what=run.name, time_limit_s=run.task.time_limit_s)
    *told, last = lines
    found = [each for each in told if "step" in each]
    if "done" not in last and "diverged" not in last:
        raise RunError(f"{run.name}: the training ended without a result, after {len(found)} evaluations")
    if "diverged" in last:
        every = run.task.evaluate_every
        n_steps = run.plan.n_steps
        known = found[-1]
        lost = {name: dict.fromkeys(known[name]) for name in ("rank0", "average")}
        rest = sorted({*range(known["step"] + every, n_steps, every), n_steps})
        found += [
            {**lost, "step": step, "losses": [], "drift": None, "noise_scale": None, "curvature": None} for step in rest
        ]
    whose = {
        name: {metric: _floats(each[name][metric] for each in found) for metric in found[0][name]}
        for name in ("rank0", "average")
    }
    losses = ([loss for loss in each["losses"] if loss is not None] for each in found)
    return Curve(
        steps=[each["step"] for each in found],
        losses=[float(np.mean(each)) if each else math.nan for each in losses],
        **whose,
        drift=_floats(each["drift"] for each in found),
        noise_scale=[each["noise_scale"] for each in found],
        curvature=[each["curvature"] for each in found],
        ranks={metric: _floats(ends) for metric, ends in found[-1].get("ranks", {}).items()},
        why=next(each["why"] for each in told if "why" in each),
    )


def _floats(values: Iterable[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _asked(
    request: Mapping[str, Any], *, what: str, time_limit_s: float, shows_output: bool = False
) -> list[dict[str, Any]]:
    """Return the lines that the training program writes in answer to a request."""
    try:
        return ask(_COMMAND, request, what=what, time_limit_s=time_limit_s, shows_output=shows_output)
    except subprocess.TimeoutExpired as late:
        steps = [each["step"] for each in parse_lines(late.stdout or b"") if "step" in each]
        reached = f"it hangs after step {steps[-1]}, or is slow" if steps else "it was not evaluated once"
        raise RunError(
            f"{what}: not done after {format_seconds(time_limit_s)}; {reached}: give a longer --time-limit, or fewer "
            f"--steps"
        ) from None


@final
class Trainer:
    """Trains runs, equal ones only once, and keeps their curves in a folder if there is one.

    Attributes: curves: By the key of their run, including reused ones.
    """

    def __init__(
        self,
        store: Store | None,
        workers: Workers,
        progress: Callable[[str, float, float | None], None],
        *,
        say: Callable[[str], None] = lambda _: None,
        free_nbytes: int | None = None,
    ) -> None:
        """Read the existing curves.

        Args:
            store: Open store of the folder.
            workers: Workers for the training. Each run is a process of one core.
            progress: Called with a sentence, the number of finished runs and their total number.
            say: Called with the memory of the runs, before they start.
            free_nbytes: Memory for all concurrent runs; None lets each run check for itself.

        Raises:
            ScenarioError: The folder belongs to a sweep.
        """
        self._store = store
        self._workers = workers
        self.progress = progress
        self.say = say
        self._free_nbytes = free_nbytes
        self._told_nbytes = 0
        self.curves: dict[str, Curve] = {}
        self._wanted: dict[str, Training] = {}
        if store is None:
            return
        if (store.folder / DESIGN).exists():
            raise ScenarioError(f"{store.folder}: holds a sweep: give another folder")
        for record in read_jsonl(store.folder / ROWS):
            if not {"key", *_FIELDS} <= record.keys():
                raise ScenarioError(
                    f"{store.folder / ROWS}: holds other rows, or those of an older version: give another folder"
                )
            self.curves[record["key"]] = Curve(**{name: record[name] for name in _FIELDS})

    @property
    def n_steps(self) -> int:
        """Steps of all distinct requested runs, including reused ones."""
        return sum(run.plan.n_steps for run in self._wanted.values())

    def train(self, runs: Sequence[Training]) -> list[Curve]:
        """Return the curves of runs, after training the missing ones.

        Raises:
            ScenarioError: The program refuses a run.
            RunError: Some runs fail. All others are finished and kept.
        """
        wanted = {run.key: run for run in runs}
        self._wanted |= wanted
        missing = {key: run for key, run in wanted.items() if key not in self.curves}
        n_fit = self._n_fit([*missing.values()])
        failed: list[str] = []
        self._report(wanted)
        with closing(finished(self._workers, train, missing.values(), n_underway=n_fit)) as outcomes:
            for run, future in outcomes:
                try:
                    self._keep(run.key, run, future.result())
                except RunError as error:
                    failed.append(str(error))
                except BrokenExecutor:
                    failed.append(f"{run.name}: its worker died")
                self._report(wanted)
        if failed:
            named = "\n".join(failed[:_MOST_NAMED])
            if len(failed) > _MOST_NAMED:
                named += "\n..."
            others = "; the others are done" if len(failed) < len(wanted) else ""
            raise RunError(f"{len(failed)} of {len(wanted)} runs failed{others}:\n{named}")
        return [self.curves[run.key] for run in runs]

    def _report(self, wanted: Mapping[str, Training]) -> None:
        self.progress("training runs", sum(key in self.curves for key in wanted), len(wanted))

    def _n_fit(self, runs: Sequence[Training]) -> int:
        """Return the number of runs that fit into memory at once, and report their memory."""
        largest = max(runs, key=lambda run: run.nbytes, default=None)
        if largest is None:
            return 0
        n_fit = sys.maxsize
        free = ""
        if self._free_nbytes is not None:
            n_fit = self._free_nbytes // largest.nbytes
            free = f"; {format_nbytes(self._free_nbytes)} are free"
        takes = f"takes {format_nbytes(largest.nbytes)} of memory for {largest.plan.world_size:,} ranks{free}"
        if n_fit == 0:
            raise RunError(f"{largest.name}: {takes}: take a smaller model or batch, or fewer ranks")
        if largest.nbytes > self._told_nbytes:
            self._told_nbytes = largest.nbytes
            limit = f", so at most {n_fit} at a time" if n_fit < self._workers.n_underway else ""
            self.say(f"a training run {takes}{limit}")
        return n_fit

    def _keep(self, key: str, run: Training, curve: Curve) -> None:
        self.curves[key] = curve
        if self._store:
            about = {"key": key, "schedule": run.label, "seed": run.seed, "lr_factor": run.lr_factor}
            self._store.append([json.dumps(about | asdict(curve)).encode()])
