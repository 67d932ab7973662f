"""A task: a small network that learns the sum of four waves, from samples with noise, and must be right within 0.1."""

import torch
from torch import nn
from torch.nn import functional

TEST = torch.linspace(-1, 1, 400).unsqueeze(1)


def waves(x):
    """Return what is to be learnt."""
    return sum(torch.sin(k * 3 * x) / k for k in (1, 2, 3, 4))


def make(rank):
    """Return the model of a rank and its optimizer; all ranks begin alike."""
    module = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return module, torch.optim.SGD(module.parameters(), lr=0.03, momentum=0.9)


def loss(outputs, targets):
    """Return the mean over the batch."""
    return functional.mse_loss(outputs, targets)


def batch(step, rank, seed):
    """Return inputs and targets of a rank in a step."""
    generator = torch.Generator().manual_seed(hash((seed, step, rank)) % 2**63)
    x = 2 * torch.rand(8, 1, generator=generator) - 1
    return x, waves(x) + 0.3 * torch.randn(8, 1, generator=generator)


def evaluate(module):
    """Return metrics of a model."""
    error = (module(TEST) - waves(TEST)).abs()
    return {"accuracy": (error < 0.1).float().mean().item(), "error": error.mean().item()}
