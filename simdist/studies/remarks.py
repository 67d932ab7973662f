"""Remarks: what a user must know beside the numbers of an answer.

Every answer has one list of them, `remarks`, in the same words whoever asks. Commands print it, `document()` has it,
frames carry it in their `attrs`, pages and notebooks show it. The functions of `import simdist` also warn.
"""

import textwrap
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from simdist.errors import SimdistWarning

if TYPE_CHECKING:
    import pandas as pd

Kind: TypeAlias = Literal["input", "derived", "assumption", "result", "accuracy"]

_OF_INPUTS = ("input", "derived")
_DOUBTS = ("input", "accuracy")
_WIDTH = 120  # columns of a sentence
_CALLERS = 3  # frames from `warnings.warn` to the code of the user


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence beside the numbers of an answer.

    Args:
        kind: `input`: a setting is probably wrong, or has no effect. `derived`: a number follows from settings.
            `assumption`: a number is not stated, or an effect is not modelled. `result`: the table does not show it.
            `accuracy`: a number is less certain than it looks.
        text: The sentence, without full stop.
        place: The path of a setting, such as `disturbances[0]`, or the label of a schedule. Empty: the whole answer.
    """

    kind: Kind
    text: str
    place: str = ""

    @property
    def is_of_inputs(self) -> bool:
        """Whether it is known before anything is simulated, so that commands print it first."""
        return self.kind in _OF_INPUTS

    @property
    def is_doubt(self) -> bool:
        """Whether it casts doubt on a number, so that Python warns."""
        return self.kind in _DOUBTS

    def document(self) -> dict[str, object]:
        """Return a remark as JSON.

        Columns:
            kind (str): `input` (a setting is probably wrong, or has no effect), `derived` (a number follows from
                settings), `assumption` (a number is not stated, or an effect is not modelled), `result` (the table
                does not show it) or `accuracy` (a number is less certain than it looks).
            text (str): Sentence.
            place (str): Path of a setting, or label of a schedule. Empty: the whole answer.
        """
        return asdict(self)

    def __str__(self) -> str:
        return self.text


def documents(remarks: Iterable[Remark]) -> list[dict[str, object]]:
    """Return remarks as JSON has them."""
    return [each.document() for each in remarks]


def below_table(remarks: Iterable[Remark]) -> list[str]:
    """Return the remarks that a command prints below its tables, a folded paragraph each."""
    shown = (f"{each}." for each in remarks if not each.is_of_inputs)
    return [textwrap.fill(sentence, _WIDTH, break_on_hyphens=False) for sentence in shown]


def with_remarks(frame: "pd.DataFrame", remarks: Iterable[Remark]) -> "pd.DataFrame":
    """Return a frame that carries remarks in its `attrs`."""
    frame.attrs["remarks"] = documents(remarks)
    return frame


def warn_of(name: str, remarks: Sequence[Remark]) -> None:
    """Warn of the doubts among some remarks; a function of `import simdist` calls this, so that its caller is named.

    Python shows each warning once for each line that asks, unless the user's filters say otherwise.
    """
    for each in remarks:
        if each.is_doubt:
            warnings.warn(f"{name}: {each}", SimdistWarning, stacklevel=_CALLERS)
