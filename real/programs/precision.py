"""The precision in which a process computes, by the names that scenarios use (`simdist.settings.precision`)."""

from collections.abc import Mapping

import torch

from simdist.settings.precision import Precision

#: Type to which autocast converts, if any.
AUTOCAST: Mapping[Precision, torch.dtype | None] = {
    "fp32": None,
    "tf32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def compute_in(precision: Precision) -> torch.dtype | None:
    """Let this process compute in a precision, and return the type for autocast, if any.

    By default, torch multiplies matrices of a GPU in fp32, but convolves in TF32. Here `fp32` is fp32 in both, and
    `tf32` is TF32 in both. Under autocast, what stays float32 has the default.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    return AUTOCAST[precision]
