"""Wraps a training loop that exists already, so that it follows a schedule."""

from real.training.planning import plan_for
from real.training.wrapping import Worker, wrap

__all__ = ["Worker", "plan_for", "wrap"]
