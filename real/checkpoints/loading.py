"""Loads a checkpoint into a model without the job that wrote it."""

import zipfile
from pathlib import Path

import torch
from torch import nn

from real.checkpoints.distributed import load_copy
from real.checkpoints.store import DamagedError
from real.checkpoints.zip_file import content_of, read_zip_index
from real.programs.rank_state import RankState
from simdist.errors import RunError, naming_file


def load_checkpoint(
    path: Path | str, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, rank: int = 0
) -> int:
    """Load a checkpoint of `real.wrap` into a model and its optimizer; no other rank is needed.

    Args:
        path: The file; the folder, if the model was under `fully_shard`.
        module: A module with the parameters and buffers of the wrapped one, sharded or not.
        optimizer: Optimizer of its parameters; None leaves out the optimizer's state.
        rank: Rank with the state to load; between averages, ranks have different states.

    Returns:
        The number of finished steps.

    Raises:
        RunError: The file is damaged, or belongs to another model.
    """
    path = Path(path)
    if path.is_dir():
        return load_copy(path, module, optimizer, rank)
    state = RankState(module, optimizer or torch.optim.SGD(module.parameters()), {}, torch.device("cpu"))
    with naming_file(path, "read"):
        try:
            index = read_zip_index(path)
        except DamagedError as error:
            raise RunError(f"{path}: {error}") from None
        if rank not in range(len(index.ranks)):
            raise RunError(f"{path}: it has no rank {rank}, of {len(index.ranks)} from 0")
        with zipfile.ZipFile(path) as archive:
            for section in ("tensors", "optimizer") if optimizer else ("tensors",):
                state.restore(section, content_of(archive, index.ranks[rank][section]))
    return index.step
