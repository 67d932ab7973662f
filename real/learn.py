"""`python -m real.learn`: train a task by a plan, with the values of all ranks, and tell how well it learns.

One JSON object on standard input is the request, see `_TrainingRequest`. JSON lines on standard output tell of it.
"""

import copy
import json
import math
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Annotated, Literal, TextIO, TypeAlias, final

import numpy as np
import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from real.execution.batching import Made, StackedModule, per_rank
from real.execution.virtual import World, perform_together
from real.models.tasks import TaskFunctions
from real.programs.binding import Binding, trained_parameters
from simdist.errors import PlanError, RunError, ScenarioError, SimdistError
from simdist.machine import free_memory_nbytes, process_nbytes
from simdist.plan import Plan, codec, ops

_DECAY = 0.8  # per evaluation
_N_SEEDS = 2**32  # numpy's and scikit-learn's generators take no larger ones

_Say: TypeAlias = Callable[[Mapping[str, object]], None]


class _DivergedError(RunError):
    """A loss is not finite any more: an outcome of the training, and no fault of the run."""


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class _TrainingRequest:
    """What to do.

    Args:
        task: Name or path.
        seed: Of initial parameters, data and random operators.
        plan: Path of the plan.
        evaluate_every: Steps between evaluations.
        lr_factor: Multiplies all learning rates of the task; not that of an outer optimizer.
        late: Rows of a trace -> ranks that were late there.
        device: Where to compute.
        describe: Say what the task's model is, and train nothing.
    """

    task: str
    seed: int = 0
    plan: str = ""
    evaluate_every: Annotated[int, Field(ge=1)] = 100
    lr_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    late: dict[int, list[int]] | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    describe: bool = False


def main(given: TextIO, out: TextIO) -> int:
    """Read an order, carry it out, and return the exit status: 0, 2 for bad input, 1 for a run that failed."""

    def say(line: Mapping[str, object]) -> None:
        print(json.dumps(line), file=out, flush=True)

    try:
        with redirect_stdout(sys.stderr):  # what a task prints is no line of the answer
            return _answer(given.read(), say)
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        return 0


def _answer(text: str, say: _Say) -> int:
    try:
        order = TypeAdapter(_TrainingRequest).validate_json(text)
        order = replace(order, seed=order.seed % _N_SEEDS)
        task = TaskFunctions(order.task, order.seed)
        (_describe if order.describe else _learn)(task, order, say)
        return 0
    except ValidationError as error:
        problems = (": ".join([*map(str, each["loc"]), each["msg"]]) for each in error.errors())
        say({"error": f"the order on standard input is wrong: {'; '.join(problems)}"})
        return 2
    except SimdistError as error:
        say({"error": str(error)} | ({"diverged": True} if isinstance(error, _DivergedError) else {}))
        return 1 if isinstance(error, RunError) else 2
    except BrokenPipeError:
        raise
    except (Exception, SystemExit) as error:  # of a function of the task
        frames = traceback.extract_tb(error.__traceback__)
        at = next((each for each in reversed(frames) if each.filename == order.task), frames[-1])
        told = " ".join([" ".join(str(error).split())[:500], *getattr(error, "__notes__", [])])
        say({"error": f"task {order.task}: {at.filename}, line {at.lineno}: {type(error).__name__}: {told}"})
        return 1


@torch.no_grad()
def _describe(task: TaskFunctions, order: _TrainingRequest, say: _Say) -> None:
    _set_seeds(order.seed)
    first = task.batch(0, 0)
    task.batch(1, 0)
    _set_seeds(order.seed)
    if not all(map(torch.equal, first, task.batch(0, 0))):
        raise ScenarioError(
            f"task {order.task}: batch(0, 0) is another when it is asked for again: it must follow from its arguments, "
            f"for evaluations ask for batches too; an iterator goes on, so index the data, or draw with a generator "
            f"that is seeded with step and rank"
        )
    module, optimizer, _ = task.make(0)
    names = {parameter: name for name, parameter in module.named_parameters()}
    rows = [(names[each], list(each.shape), str(each.dtype)[6:]) for each in trained_parameters(module)]
    if not rows:
        raise ScenarioError(f"task {order.task}: the model of make(0) has no parameter that is trained")
    updated = {each for group in optimizer.param_groups for each in group["params"]}
    if not updated <= names.keys():
        raise ScenarioError(f"task {order.task}: the optimizer of make(0) updates parameters that are not its model's")
    least_nbytes = 3 * sum(each.nbytes for each in names)  # with gradients, and a state of the optimizer
    if least_nbytes > free_memory_nbytes():
        needed = f"a step of a single rank takes {least_nbytes / 1e9:.3g} GB or more, and less is free"
        raise RunError(f"task {order.task}: {needed}: take a smaller model")
    rank_nbytes = _rank_nbytes(task, module, optimizer, torch.device("cpu"))
    about = {"tensors": rows, "metrics": [*task.evaluate(module.eval())]}
    say(about | {"process_nbytes": process_nbytes(), "rank_nbytes": rank_nbytes})


@torch.enable_grad()
def _rank_nbytes(task: TaskFunctions, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Return the bytes that a rank takes beside the buffers of a plan, by a step, which the module makes.

    What is kept for the backward pass counts twice, as gradients of it are as large.
    """
    inputs, targets = (each.to(device) for each in task.batch(0, 0))
    activations: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        activations[tensor.data_ptr()] = tensor.nbytes
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), sdpa_kernel(SDPBackend.MATH):
            with torch.autocast(device.type, dtype=task.autocast, enabled=task.autocast is not None):
                loss = task.loss(module(inputs), targets)
            loss.backward()
        optimizer.step()
    except Exception as error:
        shapes = " and ".join(f"{str(each.dtype)[6:]} {list(each.shape)}" for each in (inputs, targets))
        error.add_note(f"(of batch(0, 0), {shapes})")
        raise
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    # Of what is trained: gradients, those of the noise scale, and copies.
    of_model = [*trained_parameters(module)] * 4 + [*module.buffers()] * 2
    return sum(tensor.nbytes for tensor in (*states, *of_model, inputs, targets)) + 2 * sum(activations.values())


def _learn(task: TaskFunctions, order: _TrainingRequest, say: _Say) -> None:
    plan = codec.load(order.plan)
    if order.device == "cuda" and not torch.cuda.is_available():
        raise ScenarioError("device is cuda, and torch finds no GPU here: write cpu")
    plan_ops = {op for body in plan.bodies for op in body}
    has_slices = any(buffer.sharded_over != ops.ALONE for buffer in plan.buffers)
    has_slices |= any(isinstance(op, ops.Optimize) and bool(op.slices or op.ratios) for op in plan_ops)
    if task.max_norm and has_slices:
        raise PlanError(
            f"plan {plan.name} updates slices or takes trust ratios, and task {order.task} clips gradients before the "
            f"update: leave out max_norm, or take another plan"
        )
    _set_seeds(order.seed)
    run = _Learning(task, order, plan, say)
    run.tell(0)
    perform_together(plan, run.world.programs, run.world.memory, seed=order.seed, on_step=run.end, late=order.late)
    say({"done": True})


def _set_seeds(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@final
class _Learning:
    """A world that is trained, and watched."""

    def __init__(self, task: TaskFunctions, order: _TrainingRequest, plan: Plan, say: _Say) -> None:
        self._task = task
        self._order = order
        self._plan = plan
        self._say = say
        self._device = torch.device(order.device)
        self._n_passes = max(1, *(len(ops.forward_passes(body)) for body in plan.bodies))
        self._losses: list[float] = []
        self._noise = self._signal = 0.0
        module, optimizer, _ = self._make(0)
        self._blank = copy.deepcopy(module).to("cpu")  # before it keeps anything of a pass
        nbytes = _rank_nbytes(task, module, optimizer, self._device)
        buffers = Binding.buffers_of(plan)
        in_buffers = sum(buffer.nbytes for buffer in plan.buffers if buffer.name in buffers)
        memory_nbytes = process_nbytes() + plan.world_size * (in_buffers + nbytes)
        say({"ranks": plan.world_size, "memory_nbytes": memory_nbytes})
        self.world = World(
            plan,
            self._make,
            self._loss,
            task.batch,
            device=self._device,
            autocast=task.autocast,
            scratch_nbytes=plan.world_size * nbytes,
        )
        self._batched = self.world.why_not is None
        for optimizer in self.world.optimizers:
            self._change(optimizer)
        say({"batched": self._batched, "why": self.world.why_not})

    def end(self, step: int) -> None:
        """Note what a step has come to."""
        for scheduler in self.world.schedulers:
            scheduler.step()
        losses = self.world.losses() * self._n_passes
        computed = torch.tensor([program.loss is not None for program in self.world.programs]).expand(len(losses))
        if odd := (computed & ~losses.isfinite()).nonzero().flatten().tolist():
            raise _DivergedError(
                f"task {self._order.task}: the loss of rank {odd[0]} at step {step} is {losses[odd[0]].item()}; a "
                f"smaller learning rate may keep it finite"
            )
        self._losses.append(losses[computed].mean().item())
        if (step + 1) % self._order.evaluate_every == 0 or step + 1 == self._plan.n_steps:
            self.tell(step + 1)

    @torch.no_grad()
    def tell(self, n_steps: int) -> None:
        """Evaluate after so many steps."""
        self.world.refresh()
        average, drift = self._average()
        found: dict[str, object] = {
            "step": n_steps,
            "losses": self._losses,
            "rank0": self._metrics(self.world.modules[0]),
            "average": self._metrics(average),
            "drift": drift,
            **self._around(average, drift, n_steps % self._plan.n_steps),  # not trained on, or long ago
        }
        if n_steps == self._plan.n_steps:
            rows = [self._metrics(module) for module in self.world.modules]
            values = {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}
            found["ranks"] = {name: (_known(each.min()), _known(each.max())) for name, each in values.items()}
        self._say(found)
        self._losses = []

    def _make(self, rank: int) -> Made:
        module, optimizer, scheduler = self._task.make(rank)
        try:
            if rank:  # all begin as rank 0 does
                module.load_state_dict(self._blank.state_dict())
        except RuntimeError as error:
            told = f"makes another model than make(0): {' '.join(str(error).split())}"
            raise ScenarioError(f"task {self._order.task}: make({rank}) {told}") from None
        return module.to(self._device), optimizer, scheduler

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a pass, so that those of the passes of a step add up to their mean."""
        loss = self._task.loss(outputs, targets)
        return loss / self._n_passes if self._n_passes > 1 else loss

    def _change(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer clip gradients, rank by rank, and multiply the learning rates that it has by then."""
        factor = self._order.lr_factor
        max_norm = self._task.max_norm
        rates: list[float | Tensor] = []

        def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
            rates[:] = [group["lr"] for group in optimizer.param_groups]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            if max_norm:
                self._clip([each.grad for group in optimizer.param_groups for each in group["params"]], max_norm)

        def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _clip(self, gradients: Sequence[Tensor | None], max_norm: float) -> None:
        rows = [each if self._batched else each.unsqueeze(0) for each in gradients if each is not None]
        norms = torch.stack([row.reshape(len(row), -1).norm(dim=1) for row in rows]).norm(dim=0)
        for row in rows:  # as clip_grad_norm_ does
            row.mul_((max_norm / (norms + 1e-6)).clamp(max=1.0).view(-1, *[1] * (row.dim() - 1)))

    def _metrics(self, module: nn.Module) -> Mapping[str, float | None]:
        found = self._task.evaluate(self._copy(module).to("cpu").eval())
        return {name: _known(value) for name, value in found.items()}

    def _copy(self, module: nn.Module) -> nn.Module:
        """Return a copy that has nothing but the module's parameters and buffers."""
        found = copy.deepcopy(self._blank).to(self._device)
        for place, tensor in zip(*([*each.parameters(), *each.buffers()] for each in (found, module)), strict=True):
            place.data.copy_(tensor)
        return found

    def _average(self) -> tuple[nn.Module, float]:
        """Return the average of all ranks' models, and how far they are from it, in units of its own norm."""
        average = self._copy(self.world.modules[0])
        spread = 0.0
        size = 0.0
        rows = [[*module.parameters(), *module.buffers()] for module in self.world.modules]
        n_parameters = len([*average.parameters()])
        for at, place in enumerate([*average.parameters(), *average.buffers()]):
            if place.is_floating_point():
                ranks = torch.stack([row[at] for row in rows]).double()  # in which equal ranks are their average
                mean = ranks.mean(dim=0)
                place.copy_(mean)
                if at < n_parameters:
                    spread += (ranks - mean).square().sum().item() / len(rows)
                    size += mean.square().sum().item()
        return average, (spread / size) ** 0.5 if size else 0.0

    @torch.enable_grad()
    def _around(self, average: nn.Module, drift: float, step: int) -> dict[str, float | None]:
        """Estimate what is around the average of the ranks, by the batches that they have in a step.

        Noise scale: tr(covariance of a sample's gradient) / |gradient|^2, each a moving average over evaluations, as
        those of a step are noisy. What the data of ranks differ by is noise, too.

        Curvature along the drift: averaging lowers the loss by curvature * drift^2 / 2, to second order. Each rank's
        loss and that of its mirror image, beyond the average, are compared with that of the average: slopes cancel.

        Source:
            McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162, appendix A.1.
        """
        n_ranks = self._plan.world_size
        device = self._device
        number = step * self._n_passes
        if n_ranks == 1:
            return {"noise_scale": None, "curvature": None}
        batches = [[each.to(device) for each in self._task.batch(number, rank)] for rank in range(n_ranks)]
        n_samples = sum(len(inputs) for inputs, _ in batches)
        if self._batched:
            batches = [[torch.stack(rows) for rows in zip(*batches, strict=True)]]
        loss = per_rank(self._task.loss) if self._batched else self._task.loss

        def copies(modules: Sequence[nn.Module]) -> Iterable[nn.Module]:
            return [StackedModule(modules)] if self._batched else map(self._copy, modules)

        def total(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(device.type, dtype=self._task.autocast, enabled=self._task.autocast is not None):
                return loss(module(inputs), targets).sum()

        squares = together = apart = 0.0
        sums = [torch.zeros_like(each, dtype=torch.float64) for each in average.parameters()]
        for module, batch in zip(copies([average] * n_ranks), batches, strict=True):
            value = total(module, *batch)
            value.backward()
            together += value.item() / n_ranks
            for each, place in zip(sums, module.parameters(), strict=True):
                if place.grad is not None:
                    rows = place.grad.double().view(-1, *each.shape)
                    squares += rows.square().sum().item()
                    each += rows.sum(dim=0)
        with torch.no_grad():
            for module, batch in zip(copies(self.world.modules), batches, strict=True) if drift else ():
                for _ in range(2):
                    apart += total(module, *batch).item() / n_ranks
                    for place, mean in zip(module.parameters(), average.parameters(), strict=True):
                        place.copy_(2 * mean - place)
        small = squares / n_ranks
        large = math.fsum(each.square().sum().item() for each in sums) / n_ranks**2
        self._noise = _DECAY * self._noise + (small - large) / (n_ranks / n_samples - 1 / n_samples)
        self._signal = _DECAY * self._signal + (n_ranks * large - small) / (n_ranks - 1)
        return {
            "noise_scale": _known(self._noise / self._signal) if self._signal > 0 else None,
            "curvature": _known((apart - 2 * together) / drift**2) if drift else None,
        }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _end_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(sys.stdin, sys.stdout))
