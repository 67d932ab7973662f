"""The colours of pages, light and dark: one place for what CSS, charts and canvases use."""

from collections.abc import Mapping

from simdist.report.palette import (
    BLUE,
    DARK_PURPLE,
    DARK_YELLOW,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    WHITE,
    YELLOW,
)

LIGHT: dict[str, str] = {
    "bg": WHITE,
    "fg": "#1B1F24",
    "muted": "#57606A",
    "line": "#C9D1D9",
    "accent": BLUE,
    "surface": "#F4F6F8",
    "compute": BLUE,
    "comm": GREEN,
    "wait": DARK_PURPLE,
    "io": DARK_YELLOW,
    "host": VERMILLION,
    "heat-low": "#F4F6F8",
    "heat-middle": ORANGE,
    "heat-high": "#5B1A00",
    "line-0": "#1B1F24",
    "line-1": BLUE,
    "line-2": VERMILLION,
    "line-3": "#007A59",
    "line-4": "#A0558A",
    "line-5": DARK_YELLOW,
}
"""Custom property -> colour, on a light ground."""

DARK: dict[str, str] = {
    "bg": "#14181D",
    "fg": "#E6EAEE",
    "muted": "#A3ADB8",
    "line": "#3C4550",
    "accent": SKY,
    "surface": "#1E242B",
    "compute": SKY,
    "comm": "#2BC295",
    "wait": PURPLE,
    "io": YELLOW,
    "host": "#F07F3C",
    "heat-low": "#1E242B",
    "heat-middle": VERMILLION,
    "heat-high": "#FFF3B0",
    "line-0": "#E6EAEE",
    "line-1": SKY,
    "line-2": "#F07F3C",
    "line-3": "#2BC295",
    "line-4": PURPLE,
    "line-5": YELLOW,
}
"""Custom property -> colour, on a dark ground."""


def theme_css() -> str:
    """Return the rules that define the colours: dark where the reader prefers it, or has chosen it on the page."""
    light, dark = _properties(LIGHT, "light"), _properties(DARK, "dark")
    return (
        f":root {{{light}}}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}\n"
        f':root[data-theme="light"] {{{light}}}\n'
        f':root[data-theme="dark"] {{{dark}}}\n'
        f"@media print {{ :root, :root[data-theme] {{{light}}} }}\n"
    )


def _properties(colors: Mapping[str, str], scheme: str) -> str:
    return f" color-scheme: {scheme}; " + " ".join(f"--{name}: {color};" for name, color in colors.items()) + " "


def contrast(a: str, b: str) -> float:
    """Return the contrast of two colours, 1 to 21.

    Source:
        WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio.

    >>> round(contrast("#000000", "#FFFFFF"))
    21
    """
    darker, lighter = sorted((_luminance(a), _luminance(b)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    """Return the relative luminance of `#RRGGBB`."""
    shares = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
