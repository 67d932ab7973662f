"""What a job has learned, out of a checkpoint and without the job: for other numbers of ranks, schedules and uses."""

import zipfile
from pathlib import Path

import torch
from torch import nn

from real.checkpoints.checkpoint import DamagedError, content_of, read_index
from real.checkpoints.rank_state import RankState
from simdist.errors import RunError, naming_file


def load_checkpoint(
    path: Path | str, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, rank: int = 0
) -> int:
    """Load a checkpoint of `real.wrap` into a model and its optimizer; no other rank is needed.

    Args:
        path: The file.
        module: With the parameters and buffers of the one that was wrapped.
        optimizer: Of its parameters; None leaves the optimizer's state out.
        rank: Whose state; between averages, ranks have their own.

    Returns:
        How many steps were done.

    Raises:
        RunError: It is damaged, or of another model.
    """
    state = RankState(module, optimizer or torch.optim.SGD(module.parameters()), {}, torch.device("cpu"))
    with naming_file(Path(path), "read"):
        try:
            index = read_index(Path(path))
        except DamagedError as error:
            raise RunError(f"{path}: {error}") from None
        if rank not in range(len(index.ranks)):
            raise RunError(f"{path}: it has no rank {rank}, of {len(index.ranks)} from 0")
        with zipfile.ZipFile(path) as archive:
            for section in ("tensors", "optimizer") if optimizer else ("tensors",):
                state.restore(section, content_of(archive, index.ranks[rank][section]))
    return index.step
