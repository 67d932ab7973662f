"""The notebooks run from a fresh clone and print what they show; their tool refuses what they must not be."""

import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from matplotlib.figure import Figure
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from scripts import ROOT

from simdist.report.figures import panels

sys.path.append(str(ROOT / "tools"))  # where a script finds its neighbours
TOOL, EXECUTION, RULES, FIGURES = map(
    import_module, ("notebooks", "notebook_execution", "notebook_rules", "notebook_figures")
)
NAMES = TOOL.names()
each_notebook = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what notebooks may read."""
    folder = tmp_path_factory.mktemp("clone")
    left_out = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "*.ipynb")
    for name in ("notebooks", "experiments", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    return folder


# ---------------------------------------------------------------- the notebooks


def test_the_index_lists_every_notebook_and_no_other() -> None:
    index = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"]({name}.ipynb)" in index] == NAMES
    assert index.count(".ipynb)") == len(NAMES)


@each_notebook
def test_both_halves_of_a_pair_hold_the_same_cells(name: str) -> None:
    assert TOOL.check(name) == []


@each_notebook
def test_what_is_committed_has_captions_and_results_and_no_errors(name: str) -> None:
    notebook = TOOL.paired(name)
    nbformat.validate(notebook)
    assert [*RULES.faults_of_outputs(notebook), *RULES.faults_of_text(notebook)] == []
    assert list(RULES.faults_of_claims(notebook)) == []
    assert any(EXECUTION.has_figure(cell) for cell in notebook.cells)


@each_notebook
def test_a_notebook_runs_from_a_fresh_clone_and_prints_and_draws_what_is_committed(name: str, clone: Path) -> None:
    folder = clone / "notebooks"
    executed = EXECUTION.execute(TOOL.source(name, folder), folder)
    assert RULES.faults(executed) == []
    for cell, committed in zip(executed.notebook.cells, TOOL.paired(name).cells, strict=True):
        assert RULES.texts(cell) == RULES.texts(committed), cell.source
        assert EXECUTION.has_figure(cell) == EXECUTION.has_figure(committed), cell.source
        assert EXECUTION.drawn(cell) == EXECUTION.drawn(committed), cell.source


# ---------------------------------------------------------------- the tool

TITLE = "# Title\n\n**Question.** Why?\n\n**Answer.** Because.\n\n**Source.** A paper."
CAPTION = "*Figure 1. Time by size.*\n\n**Result.** It grows."
DRAWING = """# %matplotlib inline
from simdist.report.figures import panels

figure, (axes,) = panels()
axes.plot([1, 2], [3, 4])
axes.set(xlabel="GPUs", ylabel="time (ms)")
figure"""


def percent(*cells: str) -> str:
    """Write a source: cells that begin with `*` or `# T` are Markdown."""
    parts = []
    for cell in cells:
        if cell.startswith(("*", "# T")):
            parts.append("# %% [markdown]\n" + "\n".join(f"# {line}".rstrip() for line in cell.split("\n")))
        else:
            parts.append(f"# %%\n{cell}")
    return "\n\n".join(parts) + "\n"


def executed(folder: Path, *cells: str) -> Any:
    (folder / "9_try.py").write_text(percent(*cells), encoding="utf-8")
    return EXECUTION.execute(TOOL.source("9_try", folder), folder)


def pictured(*cells: str) -> nbformat.NotebookNode:
    """Return a notebook whose code cells carry a picture."""
    notebook = new_notebook()
    for cell in cells:
        if cell.startswith(("*", "# T")):
            notebook.cells.append(new_markdown_cell(cell))
        else:
            picture = new_output("execute_result", {"image/png": "iVBORw0KGgo="})
            notebook.cells.append(new_code_cell(cell, outputs=[picture]))
    return notebook


@pytest.mark.sentinel
def test_a_right_notebook_has_no_faults_and_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    runs = [executed(tmp_path, TITLE, DRAWING, CAPTION, "print('said')") for _ in range(2)]
    assert [RULES.faults(run) for run in runs] == [[], []]
    assert nbformat.writes(runs[0].notebook) == nbformat.writes(runs[1].notebook)
    assert [axis.label for axis in runs[0].figures[0].axes] == ["GPUs", "time (ms)"]


def test_units_letters_and_stderr_of_a_run_are_checked(tmp_path: Path) -> None:
    bad = DRAWING.replace('"GPUs"', '"size"').removesuffix("figure") + "axes.set_title('small', fontsize=7)\nfigure"
    faults = RULES.faults(executed(tmp_path, TITLE, "import sys; print('!', file=sys.stderr)", bad, CAPTION))
    assert len(faults) == 3
    assert "cell 1 writes to stderr: '!\\n'" in faults[0]
    assert "cell 2: axis 'size' with ticks" in faults[1]
    assert "names no unit" in faults[1]
    assert faults[2] == "cell 2: letters of 7 points; at least 9"


def drawn_by(folder: Path, drawing: str) -> list[str]:
    """Return what the tool notes of the only picture of a notebook."""
    (found,) = filter(None, map(EXECUTION.drawn, executed(folder, TITLE, drawing, CAPTION).notebook.cells))
    return found


def test_a_picture_carries_digests_of_its_data_which_its_last_bits_do_not_change(tmp_path: Path) -> None:
    found = drawn_by(tmp_path, DRAWING)
    assert found[0] == "axes 0: 'GPUs' linear, 'time (ms)' linear"
    assert found[1].startswith("  line #1f77b4ff '-', markers 'None' #1f77b4ff: 4 values, ")
    assert drawn_by(tmp_path, DRAWING.replace("[3, 4]", "[3.0000000000000004, 12 / 3 + 1e-14]")) == found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[3, 4]", "[3, 4.001]"),
        ("[3, 4])", "[3, 4], color='red')"),
        ("[3, 4])", "[3, 4], marker='o')"),
        ("[1, 2], [3, 4])", "[2, 1], [4, 3])"),
        ('"time (ms)")', '"time (ms)", yscale="log")'),
        ("axes.set(", "axes.text(1, 3, 'here')\naxes.set("),
        ("axes.plot", "axes.bar"),
    ],
)
def test_another_picture_has_other_digests(old: str, new: str) -> None:
    def lines(drawing: str) -> list[str]:
        names: dict[str, Figure] = {}
        exec(drawing, names)
        return list(FIGURES.drawn(names["figure"]))

    assert lines(DRAWING.replace(old, new)) != lines(DRAWING) == lines(DRAWING)


def test_bars_bands_and_shades_of_a_picture_count() -> None:
    def lines(height: float = 2.0, low: float = 0.5, shade: float = 1.0) -> list[str]:
        figure, (axes,) = panels()
        axes.bar([1, 2], [1, height])
        axes.fill_between([1, 2], [low, 0.5], [1, 1])
        axes.pcolormesh([[0, shade]])
        axes.imshow([[0, shade]])
        return list(FIGURES.drawn(figure))

    assert lines() == lines()
    for changed in (lines(height=2.1), lines(low=0.4)):
        assert sum(here != there for here, there in zip(changed, lines(), strict=True)) == 1
    assert sum(here != there for here, there in zip(lines(shade=0.9), lines(), strict=True)) == 2


def test_bins_hold_round_numbers_apart_from_their_borders() -> None:
    generator = np.random.default_rng(0)
    values = np.concatenate([np.arange(1, 10_000) / 8, np.arange(1, 10_000) / 1000, [0.0, -1.0, np.nan]])
    moved = values * (1 + 1e-14 * generator.standard_normal(len(values)))
    assert (FIGURES.bins(values) == FIGURES.bins(moved)).all()
    assert len(np.unique(FIGURES.bins(np.arange(1, 10_000)))) == 9_999


def test_a_figure_that_is_not_the_value_of_its_cell_is_refused(tmp_path: Path) -> None:
    shown = DRAWING + "\nfrom IPython.display import display\ndisplay(figure)\nNone"
    with pytest.raises(RuntimeError, match="cell 1 draws, but its value is no figure; end it with the figure's name"):
        executed(tmp_path, TITLE, shown, CAPTION)


def test_a_notebook_reaches_no_network_and_ends_where_a_cell_fails(tmp_path: Path) -> None:
    ask = "import urllib.request\nurllib.request.urlopen('http://example.org', timeout=60)"
    with pytest.raises(CellExecutionError, match="Connection refused"):
        executed(tmp_path, TITLE, ask)


@pytest.mark.parametrize(
    ("label", "ticks", "told"),
    [
        ("time (ms)", ("1", "2"), True),
        ("ms per step, average over ranks", ("1",), True),
        ("speed-up over sync", ("1.0",), True),
        ("probability that a worker is late", ("2 %",), True),
        ("bandwidth (Gbit/s)", ("1",), True),
        ("sizes", ("1",), False),
        ("", ("1",), False),
        ("", ("64",), False),
        ("", ("$\\mathdefault{10^{-2}}$",), False),
        ("", ("64 GPUs", "hsgd-4-32,8-64"), True),
        ("", (), True),
    ],
)
def test_an_axis_of_numbers_needs_a_unit_and_one_of_names_does_not(
    label: str, ticks: tuple[str, ...], told: bool
) -> None:
    assert RULES.tells_its_unit(EXECUTION.Axis(label, ticks)) is told


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        ((DRAWING, CAPTION), "the first cell is no title"),
        ((TITLE.replace("Answer", "Hope"), DRAWING, CAPTION), r"the first cell has no \*\*Answer.\*\*"),
        ((TITLE, DRAWING), "after the picture of cell 1 there is no cell with"),
        ((TITLE, DRAWING, CAPTION.replace("1.", "2.")), "after the picture of cell 1 there is no cell with"),
        ((TITLE, DRAWING, CAPTION.partition("\n")[0]), "after the picture of cell 1 there is no cell with"),
        ((TITLE, CAPTION), "cell 1 is the caption of no picture"),
    ],
)
def test_what_is_missing_in_the_words_is_named(cells: tuple[str, ...], fault: str) -> None:
    faults = "\n".join(RULES.faults_of_text(pictured(*cells)))
    assert re.search(fault, faults), faults


def claiming(text: str, *phrases: str) -> nbformat.NotebookNode:
    """Return a notebook with a text, and a cell that prints phrases of it."""
    printed = new_output("stream", name="stdout", text="".join(f"> {phrase}\n" for phrase in phrases))
    return new_notebook(cells=[new_markdown_cell(text), new_code_cell("print()", outputs=[printed])])


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("**Result.** It gains 2 to\n3 % (Figure 4) with `local-8`.", ["gains 2 to 3 %"]),
        ("**Answer.** Nobody is late.", []),
        ("Not a result: 17.", []),
        ("**Result.** With `a-2` 5 gain 7.", ["With `a-2` 5 gain 7."]),
    ],
)
def test_a_text_that_says_what_cells_print_is_right(text: str, phrases: list[str]) -> None:
    assert list(RULES.faults_of_claims(claiming(text, *phrases))) == []


@pytest.mark.parametrize(
    ("text", "phrases", "fault"),
    [
        ("**Result.** It gains 2 %.", ["It gains 3 %."], "the text does not say, as the results do: 'It gains 3 %.'"),
        ("**Result.** It gains 2 %.", [], "no cell prints a phrase with this number: '**Result.** It gains 2 %.'"),
        ("**Answer.** 2 of 3.", ["of 3"], "no cell prints a phrase with this number: '**Answer.** 2"),
    ],
)
def test_a_text_that_says_other_numbers_than_the_results_is_refused(text: str, phrases: list[str], fault: str) -> None:
    assert next(iter(RULES.faults_of_claims(claiming(text, *phrases)))).startswith(fault)


def test_folders_of_the_machine_errors_and_too_many_bytes_are_named() -> None:
    cell = new_code_cell("x", outputs=[new_output("stream", name="stdout", text="/home/me/x\n")])
    failed = new_code_cell("y", outputs=[new_output("error", ename="KeyError", evalue="'z'", traceback=[])])
    large = new_code_cell(
        "z", outputs=[new_output("display_data", {"image/png": "iVBOR" + "A" * RULES.LARGEST_NBYTES})]
    )
    found = list(RULES.faults_of_outputs(new_notebook(cells=[cell, failed, large])))
    assert found[0].startswith("cell 0 prints a folder of this machine")
    assert found[1] == "cell 1 fails: KeyError: 'z'"
    assert found[2].endswith("kB; at most 500 kB")


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        ((TITLE, "x = 1", "x"), []),
        ((TITLE, "x = 2", "x"), ["cell 1 differs: 'x = 2' in the .py, 'x = 1' in the .ipynb"]),
        ((TITLE, "x", "x = 1"), ["cell 1 differs: 'x' in the .py, 'x = 1' in the .ipynb"]),
        ((TITLE, "x = 1"), ["2 cells in the .py, 3 in the .ipynb"]),
        ((TITLE, "x = 1\ny", "x"), ["cell 1 differs: 'y' in the .py, '' in the .ipynb"]),
        ((TITLE, "x = 1", "*x*"), ["cell 2 differs: '*x*' in the .py, 'x' in the .ipynb"]),
    ],
)
def test_pairs_out_of_step_are_told_by_what_differs_first(
    cells: tuple[str, ...], fault: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "9_try.py"
    source.write_text(percent(TITLE, "x = 1", "x"), encoding="utf-8")
    assert TOOL.check("9_try", tmp_path) == ["9_try.ipynb is missing"]
    nbformat.write(TOOL.source("9_try", tmp_path), tmp_path / "9_try.ipynb")
    source.write_text(percent(*cells), encoding="utf-8")
    assert TOOL.check("9_try", tmp_path) == fault
