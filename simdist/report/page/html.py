"""HTML from Python: elements with escaped text, and common shapes."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias, final

from simdist.settings.units import format_seconds

Attribute: TypeAlias = str | int | float | bool | None

_VOID = {"br", "img", "input", "meta"}
_CODE = re.compile(r"(?<!\w)`([^`]+)`(?!\w)")
_ROUNDING_S = 1e-12  # what is left of 0 when floating-point numbers are summed


@final
class Html(str):
    """HTML text; all other text is escaped when put into an element."""

    __slots__ = ()


def escape(text: str) -> Html:
    """Return HTML that shows the text; HTML stays as it is.

    >>> escape("a < b & c")
    'a &lt; b &amp; c'
    """
    return text if isinstance(text, Html) else Html(html.escape(text))


def join(parts: Iterable[str], between: str = "") -> Html:
    """Return the parts one after the other, escaped where they are not HTML."""
    return Html(escape(between).join(map(escape, parts)))


def tag(name: str, *children: str, **attributes: Attribute) -> Html:
    """Return an element.

    Args:
        name: Such as `p`.
        children: HTML, or text that is escaped.
        attributes: `class_` stands for `class`, `aria_label` for `aria-label`; None and False leave one out.

    >>> tag("p", "1 < 2", tag("b", "!"), class_="note", hidden=True)
    '<p class="note" hidden>1 &lt; 2<b>!</b></p>'
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    start = f"<{name}{written}>"
    return Html(start if name in _VOID else f"{start}{join(children)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def prose(text: str, **foreign: str) -> Html:
    """Return text in which commands and names stand between backticks, as in Markdown.

    Args:
        text: Of this package. Backticks inside a word, as users may write them, are shown. HTML stays as it is.
        foreign: Texts that users have written, for the `{}` of these names in the text; shown as it is.

    >>> prose("`simdist -h` & more than {label}", label="a`b`")
    '<code>simdist -h</code> &amp; more than a`b`'
    """
    if isinstance(text, Html):
        return text
    parts = (part.format(**foreign) if foreign else part for part in _CODE.split(text))
    return join(tag("code", part) if number % 2 else part for number, part in enumerate(parts))


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[str] = ()) -> Html:
    """Return a table that scrolls sideways where it is too wide; the first cell of each row names it.

    Args:
        caption: Title of the table, with the unit if all cells share one.
        header: Of each column.
        rows: Cells, HTML or text.
        words: Headers of columns of words, aligned to the left as the first is; the others are numbers.
    """
    kinds = ["word" if name in words or not place else "number" for place, name in enumerate(header)]
    head = join(tag("th", name, scope="col", class_=kind) for name, kind in zip(header, kinds, strict=True))
    return framed_table(caption, head, (_row(row, kinds) for row in rows))


def framed_table(caption: str = "", head: str = "", rows: Iterable[str] = (), *, class_: str | None = None) -> Html:
    """Return a table of cells that are HTML already, in a frame in which it scrolls sideways."""
    lines = tag("thead", tag("tr", head)), tag("tbody", join(rows))
    content = tag("table", tag("caption", tag("span", caption)), *lines, class_=class_)
    return tag("div", content, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _row(cells: Sequence[str], kinds: Sequence[str]) -> Html:
    first, *others = cells
    rest = (tag("td", cell, class_=kind) for cell, kind in zip(others, kinds[1:], strict=True))
    return tag("tr", tag("th", first, scope="row", class_="word"), *rest)


def number(value: float, text: str) -> Html:
    """Return a number as people read it, with its exact value for programs."""
    return tag("data", text, value=repr(float(value)))


def duration(seconds: float, *, signed: bool = False) -> Html:
    """Return a time with a unit that suits it.

    >>> duration(0.0364), duration(-0.02, signed=True)
    ('<data value="0.0364">36.4 ms</data>', '<data value="-0.02">-20 ms</data>')
    """
    text = format_seconds(seconds if abs(seconds) > _ROUNDING_S else 0.0)
    return number(seconds, f"+{text}" if signed and seconds > _ROUNDING_S else text)


def percent(share: float) -> str:
    """Return a share as people read it.

    >>> percent(0.476), percent(0.0049), percent(0.00024), percent(0.0), percent(float("nan"))
    ('48 %', '0.49 %', '0.024 %', '0 %', '-')
    """
    if math.isnan(share):
        return "-"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def signed_percent(error: float) -> Html:
    """Return an error relative to what was measured.

    >>> signed_percent(-0.0123)
    '<data value="-0.0123">-1.2 %</data>'
    """
    return Html("-") if math.isnan(error) else number(error, f"{100 * error:+.1f} %")


def conclusions(sentences: Iterable[str]) -> Html:
    """Return the answers of a section, a paragraph each, as `prose` does."""
    return join(tag("p", prose(sentence), class_="conclusion") for sentence in sentences)


def notes(items: Iterable[str]) -> Html:
    """Return remarks as a list, as `prose` does; nothing if there are none."""
    found = join(tag("li", prose(item)) for item in items)
    return tag("ul", found, class_="notes") if found else Html("")


def select(name: str, label: str, options: Iterable[tuple[str, object]], chosen: object = None) -> Html:
    """Return a labelled select.

    Args:
        name: Its id.
        label: Stands before it.
        options: Text and value of each.
        chosen: Value of the one that is chosen at first.
    """
    found = join(tag("option", text, value=str(value), selected=value == chosen) for text, value in options)
    return tag("label", label, " ", tag("select", found, id=name, autocomplete="off"))


def controls(*children: str) -> Html:
    """Return controls in a row, which only a script makes useful."""
    return tag("div", *children, class_="controls needs-script", hidden=True)
