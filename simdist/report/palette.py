"""Colours that people of all kinds of colour vision tell apart; hatching keeps pictures readable without any colour.

Source:
    Okabe & Ito, Color Universal Design, 2008, https://jfly.uni-koeln.de/color/.
"""

from dataclasses import dataclass

BLACK = "#000000"
GREY = "#8C8C8C"
WHITE = "#FFFFFF"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
PALE_GREEN = "#DDF1EA"
PALE_GREY = "#DEDEDE"
# Hatching and outlines.
DARK_GREEN = "#005F45"
DARK_PURPLE = "#7A3F63"
DARK_YELLOW = "#857A00"


@dataclass(frozen=True, slots=True)
class Style:
    """How a kind of time is drawn: its name in the legend, the colours of its face and its hatching, the hatching."""

    label: str
    face: str
    ink: str = WHITE
    hatch: str = ""


def time_unit(longest_s: float) -> tuple[str, float]:
    """Return the unit that suits an axis up to `longest_s`, and how many of it make a second."""
    return ("s", 1.0) if longest_s >= 2 else ("ms", 1e3)
