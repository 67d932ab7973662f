"""Execute the notebooks and write them with their outputs.

    python tools/notebooks.py [NAME ...]             execute NAME.py, by default all, and write NAME.ipynb
    python tools/notebooks.py --check [NAME ...]     execute nothing; exit with 1 if a pair is out of step

A notebook is a pair in `notebooks/`: NAME.py, its source in jupytext's percent format, which reviews read, and
NAME.ipynb, the same cells with what they printed and drew. notebooks/README.md says what a notebook must look like. One
that does not is not written.
"""

import argparse
import ast
import base64
import hashlib
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

FOLDER = Path(__file__).parent.parent / "notebooks"
METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_LIMIT_S = 300
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
"""What the label of an axis of numbers must contain: a unit, what is counted, or the name of a ratio."""
_NUMBER = re.compile(r"[-−+\d.,e×%\s]+")

Notebook: TypeAlias = nbformat.NotebookNode


# ---------------------------------------------------------------- reading


def names(folder: Path = FOLDER) -> list[str]:
    """Return the names of all notebooks, those of which half is missing included."""
    return sorted({path.stem for suffix in ("py", "ipynb") for path in folder.glob(f"[0-9]*.{suffix}")})


def source(name: str, folder: Path = FOLDER) -> Notebook:
    """Read NAME.py as a notebook without outputs; the id of a cell is made of its text and stays if the cell moves."""
    notebook = jupytext.reads((folder / f"{name}.py").read_text(encoding="utf-8"), fmt="py:percent")
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def paired(name: str, folder: Path = FOLDER) -> Notebook:
    """Read NAME.ipynb."""
    return nbformat.read(folder / f"{name}.ipynb", as_version=4)


# ---------------------------------------------------------------- executing


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a figure: its label, and what stands at its ticks."""

    label: str
    ticks: tuple[str, ...]

    @property
    def tells_its_unit(self) -> bool:
        """Say whether one can tell what its numbers are; an axis of names, or without ticks, has none."""
        plain = (re.sub(r"\\[a-z]+|[$^{}]", "", tick) for tick in self.ticks)  # of formulas
        return bool(_UNIT.search(self.label)) or not any(_NUMBER.fullmatch(tick) for tick in plain)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure that a cell drew.

    Args:
        cell: Number of the cell.
        axes: Its axes that can be seen.
        smallest_pt: Size of its smallest letters.
    """

    cell: int
    axes: tuple[Axis, ...]
    smallest_pt: float


@dataclass(frozen=True, slots=True)
class Executed:
    """A notebook with its outputs, and what its figures are made of."""

    notebook: Notebook
    figures: tuple[Drawn, ...]


_AXES = (
    "[(axis.get_label_text(), [tick.get_text() for tick in axis.get_ticklabels() if tick.get_visible()])"
    " for axes in Out[{n}].axes if axes.axison for axis in (axes.xaxis, axes.yaxis) if axis.get_visible()]"
)
_SIZES = (
    "[text.get_fontsize() for text in Out[{n}].findobj(lambda artist: hasattr(artist, 'get_fontsize'))"
    " if text.get_visible() and text.get_text().strip()]"
)


def execute(notebook: Notebook, folder: Path = FOLDER) -> Executed:
    """Execute a notebook in `folder`, by the Python that runs this, with no settings of the user and no network.

    Raises:
        CellExecutionError: A cell failed; the message holds the cell and its traceback.
        TimeoutError: A cell took more than `CELL_LIMIT_S`.
    """
    figures: list[Drawn] = []

    async def note_figure(cell: Notebook, cell_index: int, execute_reply: object) -> None:
        if has_figure(cell):
            n = cell.execution_count
            asked = {"axes": _AXES.format(n=n), "sizes": _SIZES.format(n=n)}
            reply = await client.kc.execute("", silent=True, user_expressions=asked, reply=True, timeout=CELL_LIMIT_S)
            axes, sizes = (_value(reply["content"]["user_expressions"][key], cell_index) for key in asked)
            drawn = tuple(Axis(label, tuple(ticks)) for label, ticks in axes)
            figures.append(Drawn(cell_index, drawn, min(sizes, default=SMALLEST_PT)))

    # No folder of kernels: python3 is then the interpreter that runs this, whatever is registered on the machine.
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=CELL_LIMIT_S,
        record_timing=False,
        coalesce_streams=True,  # lines arrive together or apart, as it happens
        extra_arguments=["--log-level=CRITICAL"],
        resources={"metadata": {"path": str(folder)}},
        on_cell_executed=note_figure,
    )
    with tempfile.TemporaryDirectory() as profile:
        client.execute(
            env=_environment(profile), cleanup_kc=True
        )  # of a manager that is passed it would keep the kernel
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", ()):
            if has_picture(output):
                output.data["image/png"] = _smaller(output.data["image/png"])
    return Executed(notebook, tuple(figures))


def _smaller(png: str) -> str:
    """Return a picture with at most 256 colours, which are enough for lines and letters: a third of the bytes."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    packed = io.BytesIO()
    picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True)
    return base64.b64encode(packed.getvalue()).decode()


def _environment(profile: str) -> dict[str, str]:
    """Return the kernel's environment: an empty profile, and a proxy that answers nobody."""
    nowhere = "http://127.0.0.1:9"  # the port at which everything is discarded
    proxies = {"http_proxy": nowhere, "https_proxy": nowhere, "no_proxy": "localhost,127.0.0.1"}
    mine = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}  # the kernel sets its own
    return mine | proxies | {"IPYTHONDIR": profile}


def _value(answer: dict[str, object], cell_index: int) -> list[object]:
    match answer:
        case {"status": "ok", "data": {"text/plain": str(text)}}:
            found = ast.literal_eval(text)
            assert isinstance(found, list)
            return found
        case _:
            raise RuntimeError(f"cell {cell_index} draws, but its value is no figure; end it with the figure's name")


# ---------------------------------------------------------------- what is wrong


def has_picture(output: Notebook) -> bool:
    """Say whether an output of a cell is a picture."""
    return "image/png" in output.get("data", {})


def has_figure(cell: Notebook) -> bool:
    """Say whether a cell carries a picture."""
    return any(map(has_picture, cell.get("outputs", ())))


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


def faults_of_figures(figures: Sequence[Drawn]) -> Iterator[str]:
    """Yield axes without units, and letters that are too small."""
    for figure in figures:
        for axis in figure.axes:
            if not axis.tells_its_unit:
                yield f"cell {figure.cell}: axis {axis.label!r} with ticks {axis.ticks[:3]} names no unit"
        if figure.smallest_pt < SMALLEST_PT:
            yield f"cell {figure.cell}: letters of {figure.smallest_pt:g} points; at least {SMALLEST_PT:g}"


def faults(executed: Executed) -> list[str]:
    """Return all that is wrong with a notebook that was executed."""
    notebook = executed.notebook
    return [*faults_of_outputs(notebook), *faults_of_text(notebook), *faults_of_figures(executed.figures)]


# ---------------------------------------------------------------- the command


def check(name: str, folder: Path = FOLDER) -> list[str]:
    """Return where a pair is out of step, without executing it."""
    for suffix in ("py", "ipynb"):
        if not (folder / f"{name}.{suffix}").exists():
            return [f"{name}.{suffix} is missing"]
    return list(faults_of_pair(source(name, folder), paired(name, folder)))


def write(name: str) -> list[str]:
    """Execute a notebook and write it, unless something is wrong with it; return what is."""
    before_s = time.perf_counter()
    try:
        executed = execute(source(name))
    except (CellExecutionError, RuntimeError) as error:
        return [str(error)]
    wrong = faults(executed)
    if not wrong:
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(executed.notebook, path)
        n_figures, nbytes = len(executed.figures), path.stat().st_size
        print(f"{name}: {n_figures} figures, {nbytes / 1e3:.0f} kB, {time.perf_counter() - before_s:.1f} s")
    return wrong


def main() -> int:
    """Execute or check notebooks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="without suffix; by default all")
    parser.add_argument("--check", action="store_true", help="only say which pairs are out of step")
    arguments = parser.parse_args()
    n_wrong = 0
    for name in arguments.names or names():
        for fault in check(name) if arguments.check else write(name):
            n_wrong += 1
            print(f"{name}: {fault}", file=sys.stderr)
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
