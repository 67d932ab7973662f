"""The precision of a process: TF32 is one of its own."""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from real.programs.precision import AUTOCAST, compute_in
from simdist.settings.precision import Precision


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Restore what torch had before."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_every_precision_of_a_workload_can_be_computed_in() -> None:
    assert set(AUTOCAST) == set(get_args(Precision))


@pytest.mark.parametrize(
    ("precision", "autocast", "matrices", "convolutions"),
    [
        ("fp32", None, False, False),
        ("tf32", None, True, True),
        ("bf16", torch.bfloat16, False, True),
        ("fp16", torch.float16, False, True),
    ],
)
def test_fp32_uses_no_tf32_and_tf32_uses_it_everywhere(
    precision: Precision, autocast: torch.dtype | None, matrices: bool, convolutions: bool
) -> None:
    assert compute_in(precision) == autocast
    assert torch.backends.cuda.matmul.allow_tf32 is matrices
    assert torch.backends.cudnn.allow_tf32 is convolutions
