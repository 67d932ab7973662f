"""Pages as a reader finds them: their texts, tables and data; and the contrast of colours."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path


def contrast(a: str, b: str) -> float:
    """Return the contrast of two colours, 1 to 21.

    Source:
        WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio.
    """
    darker, lighter = sorted((_luminance(a), _luminance(b)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    """Return the relative luminance of `#RRGGBB`."""
    shares = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@dataclasses.dataclass
class Element:
    name: str
    attributes: dict[str, str | None]
    text: str = ""


class Page(HTMLParser):
    """The elements of a page in their order, the tables by caption, the text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.tables: dict[str, list[list[str | float]]] = {}
        self.text = ""
        self._open: list[Element] = []
        self._rows: list[list[str | float]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in {"meta", "input", "br", "link", "img"}:
            self._open.append(element)
        if tag == "table":
            self._rows = []
        if tag == "tr":
            self._rows.append([])
        if tag in {"td", "th"} and self._rows:
            self._rows[-1].append("")
        if tag == "data":
            self._rows[-1][-1] = float(element.attributes["value"])

    def handle_endtag(self, tag):
        assert self._open[-1].name == tag, f"<{self._open[-1].name}> is closed by </{tag}>"
        self._open.pop()

    def handle_data(self, data):
        for element in self._open:
            element.text += data
        names = [element.name for element in self._open]
        if "caption" in names:
            self.tables[data] = self._rows
        if names and names[-1] in {"td", "th"}:
            self._rows[-1][-1] += data
        if not {"script", "style"} & set(names):
            self.text += data

    def all(self, name: str) -> list[Element]:
        return [element for element in self.elements if element.name == name]

    def rows(self, caption: str) -> dict[str, list[str | float]]:
        """Return the lines of a table by their first cell."""
        return {line[0]: line[1:] for line in self.tables[caption][1:]}


def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))
