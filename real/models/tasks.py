"""Tasks: a model, its data and what makes it good; shipped ones, and those of a user's file.

Nothing is downloaded: the digits are drawn, the text is sums, and so every rank of every run can tell any batch.
"""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from real.execution.batching import Made, Scheduler
from real.models.classifiers import classifier, conv_bn, named
from real.models.gpt import Gpt
from real.programs.base import Batch
from simdist.errors import ScenarioError


@dataclass(frozen=True, slots=True)
class Task:
    """What is learned.

    Args:
        make: Rank -> its module, the optimizer of its parameters, and the scheduler of its learning rate if it has one.
        loss: (outputs, targets) -> mean over the batch.
        batch: (step, rank) -> inputs and targets.
        evaluate: Module in evaluation mode -> metrics by name.
        max_norm: Gradients are clipped to this norm before each update; None: they are not.
        autocast: Type of lower precision for forward and backward pass; None: there is none.
    """

    make: Callable[[int], Made]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[int, int], Batch]
    evaluate: Callable[[nn.Module], Mapping[str, float]]
    max_norm: float | None = None
    autocast: torch.dtype | None = None


def load(name: str, seed: int) -> Task:
    """Return a task that ships, or that of a file.

    Args:
        name: One of `TASKS`, or the path of a Python file with `make`, `loss`, `batch` and `evaluate`.
        seed: Of initial parameters, and of data if the task's `batch` takes a seed.

    Raises:
        ScenarioError: There is no such task, the file cannot be run, or lacks a function.
    """
    given = TASKS[name]() if name in TASKS else _of_file(name)
    for function in ("make", "loss", "batch", "evaluate"):
        if not callable(given.get(function)):
            raise ScenarioError(
                f"task {name}: there is no function `{function}`; a task has make(rank), loss(outputs, targets), "
                f"batch(step, rank) and evaluate(module)"
            )
    make, batch = (_with_seed(given[function], seed) for function in ("make", "batch"))
    max_norm, autocast = given.get("max_norm"), given.get("autocast")
    if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
        raise ScenarioError(f"task {name}: max_norm is {max_norm!r}; write a number above 0, or leave it out")
    if autocast is not None and autocast not in (torch.bfloat16, torch.float16):
        raise ScenarioError(f"task {name}: autocast is {autocast!r}; write torch.bfloat16 or torch.float16")
    return Task(
        partial(_made, name, make, seed),
        partial(_lost, name, given["loss"]),
        partial(_drawn, name, batch),
        partial(_measured, name, given["evaluate"]),
        max_norm,
        autocast,
    )


def _of_file(path: str) -> Mapping[str, Any]:
    if not Path(path).is_file():
        raise ScenarioError(f"task {path}: there is no such file; tasks that ship: {', '.join(TASKS)}")
    spec = importlib.util.spec_from_file_location("simdist_task", path)
    if spec is None or spec.loader is None:
        raise ScenarioError(f"task {path}: a task is a Python file, with a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ScenarioError(f"task {path}: cannot be run: {type(error).__name__}: {error}") from error
    return vars(module)


def _with_seed(function: Callable[..., Any], seed: int) -> Callable[..., Any]:
    return partial(function, seed=seed) if "seed" in inspect.signature(function).parameters else function


def _made(name: str, make: Callable[[int], Any], seed: int, rank: int) -> Made:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = make(rank)
    match made:
        case (nn.Module() as module, torch.optim.Optimizer() as optimizer):
            return module, optimizer, None
        case (nn.Module() as module, torch.optim.Optimizer() as optimizer, Scheduler() as scheduler):
            return module, optimizer, scheduler
    raise ScenarioError(
        f"task {name}: make({rank}) returns {_kinds(made)}; it should return (module, optimizer) or (module, "
        f"optimizer, scheduler)"
    )


def _lost(name: str, loss: Callable[[Tensor, Tensor], Any], outputs: Tensor, targets: Tensor) -> Tensor:
    value = loss(outputs, targets)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
        raise ScenarioError(f"task {name}: loss returns {_kinds(value)}{shape}; it should return one number, a tensor")
    return value.squeeze()


def _drawn(name: str, batch: Callable[[int, int], Any], step: int, rank: int) -> Batch:
    drawn = batch(step, rank)
    match drawn:
        case (Tensor() as inputs, Tensor() as targets) if inputs.dim() and targets.dim():
            return inputs, targets
    raise ScenarioError(
        f"task {name}: batch({step}, {rank}) returns {_kinds(drawn)}; it should return (inputs, targets), two tensors "
        f"with samples along the first axis"
    )


def _measured(name: str, evaluate: Callable[[nn.Module], Any], module: nn.Module) -> Mapping[str, float]:
    found = evaluate(module)
    metrics = found if isinstance(found, Mapping) else {"metric": found}
    try:
        return {str(metric): float(value) for metric, value in metrics.items()}
    except (TypeError, ValueError):
        raise ScenarioError(
            f"task {name}: evaluate returns {_kinds(found)}; it should return a number, or a dict of numbers"
        ) from None


def _kinds(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(each).__name__ for each in value)})"
    return type(value).__name__


_BATCH_SIZE = 16
_SEGMENTS = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")  # of 0 to 9
_STROKES: Mapping[str, tuple[slice, slice]] = {  # rows and columns of a 7 x 5 image
    "a": (slice(0, 1), slice(0, 5)),
    "b": (slice(0, 4), slice(4, 5)),
    "c": (slice(3, 7), slice(4, 5)),
    "d": (slice(6, 7), slice(0, 5)),
    "e": (slice(3, 7), slice(0, 1)),
    "f": (slice(0, 4), slice(0, 1)),
    "g": (slice(3, 4), slice(0, 5)),
}


def _generator(*numbers: int) -> torch.Generator:
    """Return a generator for each tuple of numbers; they are hashed, so that neighbours are unrelated."""
    return torch.Generator().manual_seed(hash(numbers) % 2**63)


def draw_digits(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Return images of digits as displays show them: moved by up to two pixels, of any contrast, in noise.

    Args:
        labels: 0 to 9, `[n]`.
        generator: Of places, contrasts and noise.

    Returns:
        float32 `[n, 1, 8, 8]`.
    """
    glyphs = torch.zeros(10, 4, 2, 8, 8)  # digit, shift down, shift right
    for digit, segments in enumerate(_SEGMENTS):
        for down in range(4):
            for right in range(2):
                for rows, columns in map(_STROKES.__getitem__, segments):
                    glyphs[digit, down, right, down:, right:][rows, columns] = 1.0
    places = [torch.randint(size, labels.shape, generator=generator) for size in (4, 2)]
    contrast = 0.5 + torch.rand(len(labels), 1, 1, generator=generator)
    noise = torch.randn(len(labels), 8, 8, generator=generator)
    return (glyphs[labels, places[0], places[1]] * contrast + 0.7 * noise).unsqueeze(1)


def _digits(*, split: bool = False) -> dict[str, Any]:
    """A ConvNet with batch normalisation; its accuracy on images that it has not seen.

    Args:
        split: Seven of eight samples of rank r are of the digits r and r + 1, modulo 10, as with clients of federated
            learning; and the network has no batch normalisation, whose statistics would be of two digits.
    """
    generator = _generator(1)
    labels = torch.arange(10).repeat_interleave(300)
    images = draw_digits(labels, generator)
    test_labels = torch.arange(1000) % 10
    test_images = draw_digits(test_labels, generator)

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = [conv_bn(1, 8, 3), conv_bn(8, 16, 3, stride=2)]
        if split:
            layers = [
                nn.Sequential(each[0], nn.GroupNorm(2, width), nn.ReLU())
                for each, width in zip(layers, (8, 16), strict=True)
            ]
        module = named({"first": layers[0], "second": layers[1], "classifier": classifier(16, 10)})
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
    """A character GPT on sums, `7+8=15;`; its accuracy on characters behind `=`, and its loss on all."""

    def sums(n_texts: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        numbers = torch.randint(100, (n_texts, _LENGTH // 4 + 1, 2), generator=generator).tolist()
        texts = ["".join(f"{a}+{b}={a + b};" for a, b in row)[: _LENGTH + 1] for row in numbers]
        tokens = torch.tensor([[_CHARACTERS.index(each) for each in text] for text in texts])
        return tokens[:, :-1], tokens[:, 1:]

    pool, test = (sums(n_texts, _generator(number)) for number, n_texts in ((3, 4096), (4, 200)))

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = Gpt(n_tokens=len(_CHARACTERS), length=_LENGTH, width=32, n_layers=2, n_heads=2)
        return module, torch.optim.AdamW(module.parameters(), lr=3e-3)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def batch(step: int, rank: int, seed: int) -> Batch:
        chosen = torch.randint(len(pool[0]), (_BATCH_SIZE,), generator=_generator(5, seed, step, rank))
        return pool[0][chosen], pool[1][chosen]

    def evaluate(module: nn.Module) -> dict[str, float]:
        inputs, targets = test
        logits = module(inputs)
        is_equals, is_end = inputs == _CHARACTERS.index("="), inputs == _CHARACTERS.index(";")
        is_answer = is_equals.cumsum(1) > is_end.cumsum(1)
        right = (logits.argmax(dim=2) == targets)[is_answer].float().mean()
        return {"accuracy": right.item(), "loss": loss(logits, targets).item()}

    return {"make": make, "loss": loss, "batch": batch, "evaluate": evaluate}


CURVATURES = torch.logspace(0, -2, 10, dtype=torch.float64)  # condition number 100


class Quadratic(nn.Module):
    """f(x) = 1/2 sum_i c_i x_i^2 with the curvatures c, seen through noise: the gradient of a sample is c x - z."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(len(CURVATURES), dtype=torch.float64))

    def forward(self, noise: Tensor) -> Tensor:
        """Return f(x) - z x of each sample, from z `[batch, 10]`."""
        return (CURVATURES.to(noise.device) * self.x**2).sum() / 2 - noise @ self.x


def _quadratic() -> dict[str, Any]:
    """An ill-conditioned quadratic with gradient noise of variance 1, in float64; its `loss` is f itself.

    With learning rate r, n ranks, batches of b samples and a = 1 - r c, the average of the ranks, which is also what
    synchronous SGD has, begins at 1 and has after t steps the second moment

        m_t = a^2t + r^2 / (n b) (1 - a^2t) / (1 - a^2)

    in each coordinate. So the expected loss is sum_i c_i m_t / 2, whether gradients or parameters are averaged, and
    however seldom. A rank of local SGD has, k steps after an average, besides

        (1 - 1/n) r^2 / b (1 - a^2k) / (1 - a^2)

    Source: both are sums of the recursion x <- a x + r z, which is linear, so averages pass through it.
    """

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = Quadratic()
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
