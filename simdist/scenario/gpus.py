"""The generation of a GPU, by which published rows are classified: from its compute capability, or from its name."""

import re
from typing import Literal, TypeAlias

#: Architectures by their first GPU for training. `pascal` stands for older ones, too, and `hopper` for later ones.
Generation: TypeAlias = Literal["pascal", "volta", "ampere", "hopper", "mi250x", "mi300x"]

_SINCE: tuple[tuple[float, Generation], ...] = ((9.0, "hopper"), (8.0, "ampere"), (7.0, "volta"), (0.0, "pascal"))
_NAMES: tuple[tuple[Generation, str], ...] = (
    ("mi250x", "MI250X?|MI210|MI100|MI[56]0"),
    ("mi300x", "MI300[XA]?|MI325X?|MI35[05]X?"),
    ("hopper", "G?H[128]00|GH200|H20|G?B[123]00|RTX 50[5-9]0( Ti)?|RTX PRO [456]000"),
    ("ampere", "A[18]00|A[123]0G?|A16|A2|A40|A[4-6]000|RTX A[4-6]000|L4|L20|L40S?|(RTX )?[34]0[6-9]0( Ti)?"),
    ("volta", "V100S?|T4G?|TITAN (V|RTX)|QUADRO RTX [4-8]000|(RTX )?20[6-8]0( Ti)?"),
    ("pascal", "K[1248]0[cmx]?|M40|M60|P4|P40|P100|P10[26]-100|TITAN X[Pp]?|(GTX )?(9[78]0|10[6-8]0)( Ti)?"),
)


def generation_of(name: str, compute_capability: float | None) -> Generation | None:
    """Return the generation of a GPU; None if neither tells it.

    Args:
        name: As people write it, such as `A100 SXM4 80 GB`.
        compute_capability: As CUDA has it; it counts first.

    >>> generation_of("Tesla P40", None), generation_of("", 8.9), generation_of("TPU v5e", None)
    ('pascal', 'ampere', None)
    """
    if compute_capability is not None:
        return next(generation for least, generation in _SINCE if compute_capability >= least)
    return next((each for each, names in _NAMES if re.search(rf"\b({names})\b", name, re.IGNORECASE)), None)
