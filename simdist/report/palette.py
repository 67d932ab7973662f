"""Colours that people of all kinds of colour vision tell apart; hatching keeps pictures readable without any colour.

Source:
    Okabe & Ito, Color Universal Design, 2008, https://jfly.uni-koeln.de/color/.
"""

from dataclasses import dataclass

BLACK, GREY, WHITE = "#000000", "#8C8C8C", "#FFFFFF"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
PALE_GREEN, PALE_GREY = "#DDF1EA", "#DEDEDE"
DARK_GREEN, DARK_PURPLE, DARK_YELLOW = "#005F45", "#7A3F63", "#857A00"  # hatching and outlines


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
