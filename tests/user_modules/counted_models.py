"""Models of users, for `simdist init --from`."""

import torch
from torch import Tensor, nn

GLOBAL = nn.Linear(3, 4)
NUMBER = 5


class Tied(nn.Module):
    """An embedding of 10 tokens that also makes the logits, with a frozen layer and a buffer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(4))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.frozen(self.embedding(tokens)) * self.mask))


class Backwards(nn.Module):
    """Its layers are used in another order than they are defined in, and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 2)
        self.idle = nn.Linear(5, 5)
        self.first = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def tied():
    return Tied(), torch.zeros(3, 7, dtype=torch.long)


def tied_by_name():
    return Tied(), {"tokens": torch.zeros(3, 7, dtype=torch.long)}


def backwards():
    return Backwards(), [torch.zeros(4, 3), torch.zeros(4, 2)]  # with targets, as a data loader yields them


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), torch.zeros(3, 5)


def lazy_alone():
    return nn.Sequential(nn.LazyLinear(4))


def huge():
    return nn.Sequential(*(nn.Linear(32768, 32768, bias=False) for _ in range(64))).to(torch.bfloat16)


def mixed():
    return nn.Sequential(nn.Linear(8, 8).to(torch.bfloat16), nn.LayerNorm(8))


def doubles():
    return nn.Linear(3, 4, dtype=torch.float64)


def convolution():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))


def compiled():
    return torch.compile(nn.Linear(3, 4)), torch.zeros(2, 3)


def all_frozen():
    return nn.Linear(3, 4).requires_grad_(False)


def reads_values():
    module = nn.Linear(3, 4)
    print("weights add up to", module.weight.sum().item())
    return module


def with_optimizer():
    module = nn.Linear(3, 4)
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def nothing():
    pass


def of_size(width, depth=1):
    return nn.Linear(width, depth)


def wrong_batch():
    return nn.Linear(3, 4), torch.zeros(2, 5)


def leaves():
    raise SystemExit(3)
