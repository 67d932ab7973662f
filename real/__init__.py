"""The real backend: the plans of simdist, executed with torch.distributed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from real.training import Worker, wrap

__all__ = ["Worker", "wrap"]


def __getattr__(name: str) -> object:
    """Import what a training script needs when it asks for it, because `python -m real` does not."""
    if name in __all__:
        from real import training

        return vars(training)[name]
    raise AttributeError(f"module 'real' has no attribute {name!r}")
