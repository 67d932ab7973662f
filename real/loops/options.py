"""Options of `real.wrap` that few loops need, in groups."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from real.processes.launch import START_TIMEOUT_S
from real.programs.optimizers import MakeOptimizer, nesterov
from real.programs.rank_state import Stateful
from real.watching.watch import Watching
from simdist.errors import ScenarioError
from simdist.plan.delays import Delays


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """Options for averages of parameters, in addition to the schedule.

    Args:
        outer_optimizer: Makes DiLoCo's outer optimizer from the list of all trained parameters, or of this rank's
            slices of them under `fully_shard`; by default
            `torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)`.
        final_average: Average the parameters over all ranks at the end of the loop, if they differ.
        average_buffers: The average at the end includes floating-point buffers, such as BatchNorm's.
    """

    outer_optimizer: MakeOptimizer = nesterov
    final_average: bool = True
    average_buffers: bool = False


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Checkpoints of a loop. It resumes from the newest one.

    Args:
        folder: Folder of the checkpoints. Only rank 0 uses it.
        every: Steps from one checkpoint to the next. One is also written after the last step.
        also: Other objects to save, by name, such as learning rate schedulers and gradient scalers.

    Raises:
        ScenarioError: A value is invalid.
    """

    folder: Path | str
    _: KW_ONLY
    every: int = 100
    also: Mapping[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ScenarioError(f"every={self.every}; checkpoints are at least 1 step apart")
        stateless = [name for name, each in self.also.items() if not isinstance(each, Stateful)]
        if stateless:
            raise ScenarioError(f"also: {', '.join(stateless)} has no state_dict() and load_state_dict(): leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Options for experiments and measurements.

    Args:
        trace: File to which rank 0 writes the trace of the run.
        delays: Injected delays, channel -> float64 `[1, n_steps, world_size]`, seconds. Default: those of the run
            directory.
        watching: Report while the loop runs which rank is late. None does not.
    """

    trace: Path | str | None = None
    delays: Delays | None = None
    watching: Watching | None = None

    def __post_init__(self) -> None:
        if not (self.watching is None or isinstance(self.watching, Watching)):
            raise TypeError(f"real.Experiment(watching={self.watching!r}): write watching=real.Watching(...)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Options for the start of ranks, and their timeout.

    Args:
        ranks_per_node: Ranks of one machine, for a schedule. The default is torchrun's number.
        timeout_s: Limit for each wait for other ranks.
        start_timeout_s: Limit for all ranks to call `wrap`, if it is longer than `timeout_s`.

    Raises:
        ScenarioError: A value is invalid.
    """

    ranks_per_node: int | None = None
    timeout_s: float = 60.0
    start_timeout_s: float = START_TIMEOUT_S

    def __post_init__(self) -> None:
        for name, limit_s in (("timeout_s", self.timeout_s), ("start_timeout_s", self.start_timeout_s)):
            if limit_s <= 0:
                raise ScenarioError(f"{name}={limit_s}; write seconds, more than 0")


def check_groups(
    averaging: Averaging, checkpointing: Checkpointing | None, experiment: Experiment, launch: Launch
) -> None:
    """Check that the values are groups of options.

    Raises:
        TypeError: A value has another class. The error names the right one.
    """
    expected: list[tuple[str, object, type]] = [
        ("averaging", averaging, Averaging),
        ("experiment", experiment, Experiment),
        ("launch", launch, Launch),
    ]
    if checkpointing is not None:
        expected.append(("checkpointing", checkpointing, Checkpointing))
    for name, value, kind in expected:
        if not isinstance(value, kind):
            raise TypeError(f"real.wrap({name}={value!r}): write {name}=real.{kind.__name__}(...)")
