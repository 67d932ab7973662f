"""Text of users in pictures: drawn letter by letter as it stands, and short enough to leave room for the rest."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def literal_text() -> Iterator[None]:
    """Take `$` for a dollar and not for the start of a formula, and draw characters that the font lacks as boxes.

    Needed where texts are made, and where a figure is drawn, because labels of ticks may be made only then.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False, "text.usetex": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(Glyph .* missing|Matplotlib currently does not support)", UserWarning)
        yield


def shortened(text: str, *, most: int = 40) -> str:
    """Return a text with an ellipsis in its middle if it is longer than `most` characters; both ends stay.

    Half characters, as names of files can hold, become question marks: no font can draw them.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= most:
        return text
    n_last = (most - 1) // 2
    return f"{text[: most - 1 - n_last]}…{text[-n_last:]}"
