"""The frame of every page: head, colours, navigation, sections, and a policy under which it can request nothing."""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template

from simdist.report import palette
from simdist.report.page.html import Html, escape, join, tag

_COLOURS: dict[str, tuple[str, str]] = {
    "bg": (palette.WHITE, "#14181D"),
    "fg": ("#1B1F24", "#E6EAEE"),
    "muted": ("#57606A", "#A3ADB8"),
    "line": ("#C9D1D9", "#3C4550"),
    "accent": (palette.BLUE, palette.SKY),
    "surface": ("#F4F6F8", "#1E242B"),
    "compute": (palette.BLUE, palette.SKY),
    "comm": (palette.GREEN, "#2BC295"),
    "wait": (palette.DARK_PURPLE, palette.PURPLE),
    "io": (palette.DARK_YELLOW, palette.YELLOW),
    "host": (palette.VERMILLION, "#F07F3C"),
    "heat-low": ("#F4F6F8", "#1E242B"),
    "heat-middle": (palette.ORANGE, palette.VERMILLION),
    "heat-high": ("#5B1A00", "#FFF3B0"),
    "line-0": ("#1B1F24", "#E6EAEE"),
    "line-1": (palette.BLUE, palette.SKY),
    "line-2": (palette.VERMILLION, "#F07F3C"),
    "line-3": ("#007A59", "#2BC295"),
    "line-4": ("#A0558A", palette.PURPLE),
    "line-5": (palette.DARK_YELLOW, palette.YELLOW),
}
#: Custom property -> colour, on a light ground: one place for what CSS, charts and canvases use.
LIGHT = {name: light for name, (light, _) in _COLOURS.items()}
#: Custom property -> colour, on a dark ground.
DARK = {name: dark for name, (_, dark) in _COLOURS.items()}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page.

    Args:
        name: Its anchor.
        heading: Stands above it, and in the navigation.
        body: HTML after the heading.
    """

    name: str
    heading: str
    body: Html


def document(
    title: str, *, header: Html, sections: Sequence[Section], styles: Iterable[str] = (), scripts: Iterable[str] = ()
) -> str:
    """Return a whole page, the same for the same arguments.

    Args:
        title: Of the window.
        header: Stands at the top, with the heading of the first level.
        sections: From top to bottom.
        styles: CSS of sections.
        scripts: JavaScript of sections; no other runs, because the policy of the page has the hashes of these.
    """
    programs = [asset("page.js"), *scripts]
    return Template(asset("page.html")).substitute(
        title=escape(title),
        policy=escape(_policy(programs)),
        styles="\n".join([theme_css(), asset("page.css"), *styles]),
        header=header,
        navigation=join(tag("li", tag("a", each.heading, href=f"#{each.name}")) for each in sections),
        sections=join(map(_section, sections), "\n"),
        scripts="\n".join(f"<script>{program}</script>" for program in programs),
    )


def _section(section: Section) -> Html:
    heading = tag("h2", section.heading, id=f"{section.name}-heading")
    return tag("section", heading, section.body, id=section.name, aria_labelledby=f"{section.name}-heading")


def _policy(programs: Iterable[str]) -> str:
    """Return the Content-Security-Policy: no request at all, and no script but these.

    Source:
        W3C, Content Security Policy Level 3, https://www.w3.org/TR/CSP3/.
    """
    hashes = (base64.b64encode(hashlib.sha256(program.encode()).digest()).decode() for program in programs)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )


def theme_css() -> str:
    """Return the rules that define the colours: dark where the reader prefers it, or has chosen it on the page."""
    light = _properties(LIGHT, "light")
    dark = _properties(DARK, "dark")
    return (
        f":root {{{light}}}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}\n"
        f':root[data-theme="light"] {{{light}}}\n'
        f':root[data-theme="dark"] {{{dark}}}\n'
        f"@media print {{ :root, :root[data-theme] {{{light}}} }}\n"
    )


def _properties(colors: Mapping[str, str], scheme: str) -> str:
    return f" color-scheme: {scheme}; " + " ".join(f"--{name}: {color};" for name, color in colors.items()) + " "


def asset(name: str) -> str:
    """Return the text of a file in `assets`."""
    return (files("simdist.report.page") / "assets" / name).read_text(encoding="utf-8")


def program(*names: str) -> str:
    """Return scripts in `assets` as one, in a function, so that they see each other and nothing else does.

    Args:
        names: Without `.js`; the numbers and units that all of them write stand before the first.
    """
    parts = "\n".join(asset(f"{name}.js") for name in ("numbers", *names))
    return f'"use strict";\n\n(() => {{\n{parts}\n}})();\n'


def json_text(value: object) -> str:
    """Return JSON that can stand in a script element: no text in it can end the element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def json_block(element_id: str, value: object) -> Html:
    """Return data for a script, in an element in which nothing is HTML."""
    return tag("script", Html(json_text(value)), type="application/json", id=element_id)
