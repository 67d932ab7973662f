"""Say what is wrong with a notebook: halves out of step, outputs, words, figures. notebooks/README.md has the rules."""

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import nbformat
from notebook_execution import Axis, Drawn, Executed, Notebook, has_figure

LARGEST_NBYTES = 500_000  # what a page of a code host shows at once
SMALLEST_PT = 9.0

_UNIT = re.compile(
    r"""(?<!\w)(
        [munµ]?s | min | h | % | [kMGT]?i?B(/s)? | [kMG]bit/s | [MGT]?FLOP(/s)?
        | seeds | GPUs | nodes | ((images | samples)(/s)?)
        | (worker | rank | parameter | step | epoch | scenario | span)s?
        | density | probability | share | ratio | speed-ups? | utilization
    )(?!\w)""",
    re.VERBOSE,
)
"""Contents that the label of an axis of numbers must have: a unit, what is counted, or the name of a ratio."""
_NO_CLAIM = re.compile(
    r"`[^`]*`|\(?Figures? \d+( to \d+|, \d+)*( and \d+)?\)?|\]\([^)]*\)|float(16|32|64)|[Nn]otebook \d+"
)
"""Names and references, whose digits tell no result."""
_NUMBER = re.compile(r"[-−+\d.,e×%\s]+")


def faults_of_pair(original: Notebook, pair: Notebook) -> Iterator[str]:
    """Yield where a pair is out of step: cells, their order, ids, settings."""
    ours, theirs = ([(cell.cell_type, cell.source) for cell in each.cells] for each in (original, pair))
    for number, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        if left != right:
            lines = zip_longest(left[1].split("\n"), right[1].split("\n"), fillvalue="")
            here, there = next((pair for pair in lines if pair[0] != pair[1]), (left[0], right[0]))
            yield f"cell {number} differs: {here!r} in the .py, {there!r} in the .ipynb"
            return
    if len(ours) != len(theirs):
        yield f"{len(ours)} cells in the .py, {len(theirs)} in the .ipynb"
    elif [cell.id for cell in original.cells] != [cell.id for cell in pair.cells] or pair.metadata != original.metadata:
        yield "ids of cells or settings differ; execute it again"


def faults_of_outputs(notebook: Notebook) -> Iterator[str]:
    """Yield outputs that a reader should not see: errors, warnings, folders of this machine; and too many bytes."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                yield f"cell {number} fails: {output.ename}: {output.evalue}"
            if output.get("name") == "stderr":
                yield f"cell {number} writes to stderr: {output.text[:200]!r}"
        if re.search(r"(/home/|/tmp/|/Users/|/root/|[A-Z]:\\)", text := "\n".join(texts(cell))):
            yield f"cell {number} prints a folder of this machine: {text[:200]!r}"
    nbytes = len(nbformat.writes(notebook).encode())
    if nbytes > LARGEST_NBYTES:
        yield f"{nbytes / 1e3:.0f} kB; at most {LARGEST_NBYTES / 1e3:.0f} kB"


def texts(cell: Notebook) -> list[str]:
    """Return all that a cell printed or returned, pictures excepted."""
    outputs = cell.get("outputs", ())
    streams = [output.text for output in outputs if output.output_type == "stream"]
    values = [output.data[mime] for output in outputs if "data" in output for mime in sorted(output.data)]
    return streams + [value for value in values if isinstance(value, str) and not value.startswith("iVBOR")]


def faults_of_text(notebook: Notebook) -> Iterator[str]:
    """Yield what is missing in the words: a title, question and answer, captions and results of figures."""
    first = notebook.cells[0]
    if first.cell_type != "markdown" or not re.match(r"# .+\n", first.source):
        yield "the first cell is no title"
    for word in ("Question", "Answer", "Source"):
        if f"**{word}.**" not in first.source:
            yield f"the first cell has no **{word}.**"
    n_figures = 0
    for number, (cell, after) in enumerate(zip(notebook.cells, [*notebook.cells[1:], None], strict=True)):
        if has_figure(cell):
            n_figures += 1
            yield from _faults_of_caption(number, after, n_figures)
        elif after is not None and after.source.startswith("*Figure"):
            yield f"cell {number + 1} is the caption of no picture"


def _faults_of_caption(number: int, after: Notebook | None, n_figures: int) -> Iterator[str]:
    caption = after.source if after is not None and after.cell_type == "markdown" else ""
    if not re.match(rf"\*Figure {n_figures}\. [^*]+\.\*\n\n\*\*Result\.\*\* .+\.$", caption, flags=re.S):
        wanted = f"`*Figure {n_figures}. CAPTION.*`, an empty line and `**Result.** SENTENCE.`"
        yield f"after the picture of cell {number} there is no cell with {wanted}, but {caption[:80]!r}"


def phrases(notebook: Notebook) -> list[str]:
    """Return the phrases of the text that cells made from results: lines of stdout that begin with `> `."""
    lines = (line for cell in notebook.cells for text in texts(cell) for line in text.splitlines())
    return [line.removeprefix("> ") for line in lines if line.startswith("> ")]


def faults_of_claims(notebook: Notebook) -> Iterator[str]:
    """Yield phrases that the text lacks, and numbers of answers and results that are in no phrase."""
    said = phrases(notebook)
    paragraphs = [" ".join(part.split()) for cell in notebook.cells for part in _paragraphs(cell)]
    for phrase in said:
        if not any(phrase in paragraph for paragraph in paragraphs):
            yield f"the text does not say, as the results do: {phrase!r}"
    for paragraph in paragraphs:
        if paragraph.startswith(("**Answer.**", "**Result.**")):
            left = _NO_CLAIM.sub(_blank, paragraph)
            for phrase in said:
                left = left.replace(_NO_CLAIM.sub(_blank, phrase), " " * len(phrase))
            if found := re.search(r"\d", left):
                begin = max(0, found.start() - 40)
                yield f"no cell prints a phrase with this number: {paragraph[begin : found.start() + 40]!r}"


def _paragraphs(cell: Notebook) -> list[str]:
    return cell.source.split("\n\n") if cell.cell_type == "markdown" else []


def _blank(found: re.Match[str]) -> str:
    return " " * len(found.group())


def tells_its_unit(axis: Axis) -> bool:
    """Say whether one can tell what the numbers of an axis are; one of names, or without ticks, has none."""
    plain = (re.sub(r"\\[a-z]+|[$^{}]", "", tick) for tick in axis.ticks)  # of formulas
    return bool(_UNIT.search(axis.label)) or not any(_NUMBER.fullmatch(tick) for tick in plain)


def faults_of_figures(figures: Sequence[Drawn]) -> Iterator[str]:
    """Yield axes without units, and letters that are too small."""
    for figure in figures:
        for axis in figure.axes:
            if not tells_its_unit(axis):
                yield f"cell {figure.cell}: axis {axis.label!r} with ticks {axis.ticks[:3]} names no unit"
        if figure.smallest_pt is not None and figure.smallest_pt < SMALLEST_PT:
            yield f"cell {figure.cell}: letters of {figure.smallest_pt:g} points; at least {SMALLEST_PT:g}"


def faults(executed: Executed) -> list[str]:
    """Return all that is wrong with a notebook that was executed."""
    notebook = executed.notebook
    said = [*faults_of_outputs(notebook), *faults_of_text(notebook), *faults_of_claims(notebook)]
    return said + list(faults_of_figures(executed.figures))
