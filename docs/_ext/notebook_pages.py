"""A page for a notebook, with the outputs and figures that it was saved with; nothing is executed."""

import json
from collections.abc import Iterator, Mapping, Sequence

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

_Text = str | Sequence[str]


class NotebookParser(MystParser):
    """Reads a notebook as the Markdown that its cells and their outputs are."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Put the notebook into the document."""
        super().parse(as_markdown(inputstring), document)


def as_markdown(notebook: str) -> str:
    """Return a notebook in Markdown.

    Args:
        notebook: Contents of an .ipynb file, nbformat 4.
    """
    document = json.loads(notebook)
    language = document.get("metadata", {}).get("kernelspec", {}).get("language", "python")
    return "\n\n".join(part for cell in document["cells"] for part in _cell(cell, language) if part.strip()) + "\n"


def _cell(cell: Mapping[str, object], language: str) -> Iterator[str]:
    text = _joined(cell["source"])  # type: ignore[arg-type]
    match cell["cell_type"]:
        case "markdown":
            yield text
        case "code":
            yield _fenced(text, language)
            for output in cell["outputs"]:  # type: ignore[attr-defined]
                yield _output(output)


def _output(output: Mapping[str, object]) -> str:
    """Return an output, in the richest form that a page can show."""
    match output:
        case {"output_type": "stream", "name": "stdout", "text": text}:
            return _fenced(_joined(text), "text")  # type: ignore[arg-type]
        case {"data": {"image/svg+xml": picture}}:
            return _fenced(_joined(picture), "{raw} html")
        case {"data": {"image/png": picture}}:
            alternative = str(output["data"].get("text/plain", "figure"))  # type: ignore[attr-defined]
            return f"![{_caption(output) or alternative}](data:image/png;base64,{''.join(_joined(picture).split())})"
        case {"data": {"text/html": html}}:
            return _fenced(f'<div class="table-wrapper">{_joined(html)}</div>', "{raw} html")
        case {"data": {"text/markdown": text}}:
            return _joined(text)
        case {"data": {"text/plain": text}}:
            return _fenced(_joined(text), "text")
        case _:
            return ""


def _caption(output: Mapping[str, object]) -> str:
    match output:
        case {"metadata": {"image/png": {"alt": str(text)}}} | {"metadata": {"alt": str(text)}}:
            return text
        case _:
            return ""


def _joined(text: _Text) -> str:
    return text if isinstance(text, str) else "".join(text)


def _fenced(text: str, language: str) -> str:
    """Put text into a block whose fence is longer than any in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
