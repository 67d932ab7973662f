"""Tasks: a model, its data and its metrics; included ones, and those of a user's file.

Nothing is downloaded: digits are drawn, and text consists of sums. So each rank of each run can compute any batch.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from real.execution.batching import Made, Scheduler
from real.models import cross_entropy
from real.models.classifiers import named_layers
from real.models.gpt import Gpt
from real.programs.base import Batch
from simdist.errors import ScenarioError

_TAKES_MORE = (torch.optim.LBFGS, torch.optim.lr_scheduler.ReduceLROnPlateau)


@final
class TaskFunctions:
    """The functions of a task, with checks of their results.

    Args:
        name: One of `TASKS`, or the path of a Python file with `make`, `loss`, `batch` and `evaluate`.
        seed: Seed of initial parameters, and of data if the task's `batch` takes a seed.

    Attributes:
        name: Name of the task, or of its file.
        max_norm: Gradients are clipped to this norm before each update; None does not clip.
        autocast: Data type of lower precision for forward and backward pass; None uses none.

    Raises:
        ScenarioError: There is no such task, or the file cannot be run or lacks a function. Methods also raise it.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self._seed = seed
        given = TASKS[name]() if name in TASKS else _of_file(name)
        for function in ("make", "loss", "batch", "evaluate"):
            if not callable(given.get(function)):
                raise ScenarioError(
                    f"task {name}: there is no function `{function}`; a task has make(rank), loss(outputs, targets), "
                    f"batch(step, rank) and evaluate(module)"
                )
        self._make, self._batch = (_with_seed(given[function], seed) for function in ("make", "batch"))
        self._loss = given["loss"]
        self._evaluate = given["evaluate"]
        self._metrics: set[str] = set()
        self.max_norm: float | None = given.get("max_norm")
        self.autocast: torch.dtype | None = given.get("autocast")
        if self.max_norm is not None and not (isinstance(self.max_norm, int | float) and self.max_norm > 0):
            raise ScenarioError(f"task {name}: max_norm is {self.max_norm!r}; it should be a number above 0, or None")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ScenarioError(f"task {name}: autocast is {self.autocast}; write torch.bfloat16 or torch.float16")

    def make(self, rank: int) -> Made:
        """Return the module of a rank, its optimizer and, if there is one, the scheduler of its learning rate."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            made = self._make(rank)
        if odd := [each for each in made if isinstance(each, _TAKES_MORE)] if isinstance(made, tuple) else []:
            raise ScenarioError(
                f"task {self.name}: make({rank}) returns {type(odd[0]).__name__}, whose `step` takes more than the "
                f"gradients: take another"
            )
        match made:
            case (nn.Module() as module, torch.optim.Optimizer() as optimizer):
                return module, optimizer, None
            case (nn.Module() as module, torch.optim.Optimizer() as optimizer, Scheduler() as scheduler):
                return module, optimizer, scheduler
        raise self._wrong(f"make({rank})", made, "(module, optimizer) or (module, optimizer, scheduler)")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        value = self._loss(outputs, targets)
        if not isinstance(value, Tensor) or value.dim():
            raise self._wrong("loss", value, "the mean over the batch, a tensor of no dimensions")
        return value

    def batch(self, step: int, rank: int) -> Batch:
        """Return inputs and targets of a pass."""
        match drawn := self._batch(step, rank):
            case (Tensor() as inputs, Tensor() as targets) if inputs.dim() and targets.dim() and len(inputs):
                return inputs, targets
        raise self._wrong(f"batch({step}, {rank})", drawn, "(inputs, targets), tensors with samples on the first axis")

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        """Return the metrics of a module in evaluation mode, by name."""
        found = self._evaluate(module)
        try:
            by_name = found if isinstance(found, dict) else {"metric": found}
            values = {str(name): float(value + 0) for name, value in by_name.items()}  # text is not a number
        except (TypeError, ValueError):
            raise self._wrong("evaluate", found, "a number, or a dict of numbers") from None
        self._metrics = self._metrics or {*values}
        if not values or values.keys() != self._metrics:
            raise self._wrong("evaluate", found, f"{', '.join(sorted(self._metrics)) or 'a metric'}, as it did before")
        return values

    def _wrong(self, call: str, value: object, wanted: str) -> ScenarioError:
        kinds: object = [type(each).__name__ for each in value] if isinstance(value, tuple) else type(value).__name__
        if isinstance(value, dict):
            kinds = {name: type(each).__name__ for name, each in value.items()}
        shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
        return ScenarioError(f"task {self.name}: {call} returns {kinds}{shape}; it should return {wanted}")


def _of_file(path: str) -> Mapping[str, Any]:
    spec = importlib.util.spec_from_file_location("simdist_task", path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise ScenarioError(f"task {path}: there is no such Python file; tasks that ship: {', '.join(TASKS)}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as if the file were run as a script
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ScenarioError(f"task {path}: cannot be run: {type(error).__name__}: {error}") from error
    return vars(module)


def _with_seed(function: Callable[..., Any], seed: int) -> Callable[..., Any]:
    return partial(function, seed=seed) if "seed" in inspect.signature(function).parameters else function


_BATCH_SIZE = 16
# Digits as images of 5 rows of 3 pixels; each row is an octal number.
_GLYPHS = (0o75557, 0o26227, 0o71747, 0o71717, 0o55711, 0o74717, 0o74757, 0o71111, 0o75757, 0o75717)


def _generator(*numbers: int) -> torch.Generator:
    """Return a generator for a tuple of numbers, which is hashed so that neighbours are unrelated."""
    return torch.Generator().manual_seed(hash(numbers) % 2**63)


def _draw_digits(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Return images of digits at random places, with random contrasts, in noise.

    Args:
        labels: 0 to 9, `[n]`.
        generator: Generator of places, contrasts and noise.

    Returns:
        float32 `[n, 1, 8, 8]`.
    """
    glyphs = torch.tensor([[int(bit) for bit in f"{glyph:015b}"] for glyph in _GLYPHS]).view(10, 5, 3)
    images = 0.2 * torch.randn(len(labels), 8, 8, generator=generator)
    places = torch.randint(4, (len(labels), 2), generator=generator).tolist()
    contrasts = 0.5 + torch.rand(len(labels), 1, 1, generator=generator)
    for image, (top, left), glyph in zip(images, places, glyphs[labels] * contrasts, strict=True):
        image[top : top + 5, left : left + 3] += glyph
    return images.unsqueeze(1)


def _digits(*, split: bool = False) -> dict[str, Any]:
    """A ConvNet with batch normalisation, and its accuracy on held-out images.

    Its activation is smooth: a ReLU with an input that is zero up to rounding would let two equal runs diverge.

    Args:
        split: Seven of eight samples of rank r show the digits r and r + 1, modulo 10, as with clients of federated
            learning. Then the network has no batch normalisation, because its statistics would come from two digits.
    """
    generator = _generator(1)
    labels = torch.arange(10).repeat_interleave(300)
    images = _draw_digits(labels, generator)
    test_labels = torch.arange(1000) % 10
    test_images = _draw_digits(test_labels, generator)

    def layer(n_in: int, n_out: int, *, stride: int) -> nn.Sequential:
        conv = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        norm = nn.GroupNorm(2, n_out) if split else nn.BatchNorm2d(n_out)
        return named_layers({"conv": conv, "norm": norm, "silu": nn.SiLU()})

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = {"first": layer(1, 8, stride=1), "second": layer(8, 16, stride=2)}
        module = named_layers(layers | {"flatten": nn.Flatten(), "linear": nn.Linear(16 * 4 * 4, 10)})
        return module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

    def batch(step: int, rank: int, seed: int) -> Batch:
        drawn = _generator(2, seed, step, rank)
        chosen = torch.randint(len(labels), (_BATCH_SIZE,), generator=drawn)
        if split:
            own = torch.randint(600, (_BATCH_SIZE,), generator=drawn).add_(300 * rank) % len(labels)
            chosen[_BATCH_SIZE // 8 :] = own[_BATCH_SIZE // 8 :]
        return images[chosen], labels[chosen]

    def evaluate(module: nn.Module) -> dict[str, float]:
        logits = module(test_images)
        right = (logits.argmax(dim=1) == test_labels).float().mean()
        return {"accuracy": right.item(), "loss": functional.cross_entropy(logits, test_labels).item()}

    return {"make": make, "loss": functional.cross_entropy, "batch": batch, "evaluate": evaluate}


_CHARACTERS = "0123456789+=;"
_LENGTH = 32


def _text() -> dict[str, Any]:
    """A character GPT on sums, `7+8=15;`, with its accuracy on characters after `=`, and its loss on all."""

    def sums(n_texts: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        numbers = torch.randint(100, (n_texts, _LENGTH // 4 + 1, 2), generator=generator).tolist()
        texts = ["".join(f"{a}+{b}={a + b};" for a, b in row)[: _LENGTH + 1] for row in numbers]
        tokens = torch.tensor([[_CHARACTERS.index(each) for each in text] for text in texts])
        return tokens[:, :-1], tokens[:, 1:]

    pool, test = (sums(n_texts, _generator(number)) for number, n_texts in ((3, 4096), (4, 200)))

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = Gpt(n_tokens=len(_CHARACTERS), length=_LENGTH, width=32, n_layers=2, n_heads=2)
        return module, torch.optim.AdamW(module.parameters(), lr=3e-3)

    def batch(step: int, rank: int, seed: int) -> Batch:
        chosen = torch.randint(len(pool[0]), (_BATCH_SIZE,), generator=_generator(5, seed, step, rank))
        return pool[0][chosen], pool[1][chosen]

    def evaluate(module: nn.Module) -> dict[str, float]:
        inputs, targets = test
        logits = module(inputs)
        is_equals = inputs == _CHARACTERS.index("=")
        is_end = inputs == _CHARACTERS.index(";")
        is_answer = is_equals.cumsum(1) > is_end.cumsum(1)
        right = (logits.argmax(dim=2) == targets)[is_answer].float().mean()
        return {"accuracy": right.item(), "loss": cross_entropy(logits, targets).item()}

    return {"make": make, "loss": cross_entropy, "batch": batch, "evaluate": evaluate}


CURVATURES = torch.logspace(0, -2, 10, dtype=torch.float64)  # condition number 100


class _Quadratic(nn.Module):
    """f(x) = 1/2 sum_i c_i x_i^2 with the curvatures c and gradient noise: the gradient of a sample is c x - z."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(len(CURVATURES), dtype=torch.float64))

    def forward(self, noise: Tensor) -> Tensor:
        """Return f(x) - z x of each sample, from z `[batch, 10]`."""
        return (CURVATURES.to(noise.device) * self.x**2).sum() / 2 - noise @ self.x


def _quadratic() -> dict[str, Any]:
    """An ill-conditioned quadratic with gradient noise of variance 1, in float64; its `loss` is f itself.

    With learning rate r, n ranks, batches of b samples and a = 1 - r c, the average of the ranks begins at 1, like
    synchronous SGD. After t steps, its second moment is

        m_t = a^2t + r^2 / (n b) (1 - a^2t) / (1 - a^2)

    in each coordinate. So the expected loss is sum_i c_i m_t / 2, whether gradients or parameters are averaged, and
    however rarely. For a rank of local SGD, k steps after an average, add

        (1 - 1/n) r^2 / b (1 - a^2k) / (1 - a^2)

    Source: both are sums of the recursion x <- a x + r z, which is linear, so it commutes with averages.
    """

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = _Quadratic()
        return module, torch.optim.SGD(module.parameters(), lr=0.5)

    def batch(step: int, rank: int, seed: int) -> Batch:
        noise = torch.randn(4, len(CURVATURES), dtype=torch.float64, generator=_generator(6, seed, step, rank))
        return noise, torch.zeros(4)

    def loss(outputs: Tensor, _targets: Tensor) -> Tensor:
        return outputs.mean()

    def evaluate(module: nn.Module) -> dict[str, float]:
        return {"loss": module(torch.zeros(1, len(CURVATURES), dtype=torch.float64)).item()}

    return {"make": make, "loss": loss, "batch": batch, "evaluate": evaluate}


TASKS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "digits": _digits,
    "text": _text,
    "quadratic": _quadratic,
    "split": partial(_digits, split=True),
}
