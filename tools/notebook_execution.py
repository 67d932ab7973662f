"""Execute a notebook: its outputs, and what its figures are made of."""

import ast
import base64
import io
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent.parent / "notebooks"
METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_LIMIT_S = 300

_DRAWN = "drawn"  # in the metadata of an output that is a picture; those of cells would be written to the .py as well
_DESCRIBE = f"__import__('runpy').run_path({str(Path(__file__).with_name('notebook_figures.py'))!r})['description']"

Notebook: TypeAlias = nbformat.NotebookNode


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a figure: its label, and what stands at its ticks."""

    label: str
    ticks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure that a cell drew.

    Args:
        cell: Number of the cell.
        axes: Its axes that can be seen.
        smallest_pt: Size of its smallest letters; None if there are none.
    """

    cell: int
    axes: tuple[Axis, ...]
    smallest_pt: float | None


@dataclass(frozen=True, slots=True)
class Executed:
    """A notebook with its outputs, and what its figures are made of."""

    notebook: Notebook
    figures: tuple[Drawn, ...]


def has_picture(output: Notebook) -> bool:
    """Say whether an output of a cell is a picture."""
    return "image/png" in output.get("data", {})


def has_figure(cell: Notebook) -> bool:
    """Say whether a cell carries a picture."""
    return any(map(has_picture, cell.get("outputs", ())))


def drawn(cell: Notebook) -> list[str]:
    """Return the lines that say what the pictures of a cell show, with digests of their data."""
    outputs = cell.get("outputs", ())
    return [line for output in outputs if has_picture(output) for line in output.metadata.get(_DRAWN, ())]


def execute(notebook: Notebook, folder: Path = FOLDER) -> Executed:
    """Execute a notebook in `folder`, by the Python that runs this, with no settings of the user and no network.

    Raises:
        CellExecutionError: A cell failed; the message holds the cell and its traceback.
        TimeoutError: A cell took more than `CELL_LIMIT_S`.
    """
    figures: list[Drawn] = []

    async def note_figure(cell: Notebook, cell_index: int, execute_reply: object) -> None:
        if has_figure(cell):
            asked = {"figure": f"{_DESCRIBE}(Out[{cell.execution_count}])"}
            channel = cast(Any, client.kc)  # its class says nothing of `reply`
            reply = await channel.execute("", silent=True, user_expressions=asked, reply=True, timeout=CELL_LIMIT_S)
            said = _value(reply["content"]["user_expressions"]["figure"], cell_index)
            axes = tuple(Axis(label, tuple(ticks)) for label, ticks in said["axes"])
            figures.append(Drawn(cell_index, axes, said["smallest_pt"]))
            for output in filter(has_picture, cell.outputs):
                output.metadata[_DRAWN] = said[_DRAWN]

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
        # cleanup_kc: the kernel of a manager that is passed would go on.
        client.execute(env=_environment(profile), cleanup_kc=True)
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
    """Return the kernel's environment: an empty profile, and a proxy that answers no request."""
    nowhere = "http://127.0.0.1:9"  # the port at which everything is discarded
    proxies = {"http_proxy": nowhere, "https_proxy": nowhere, "no_proxy": "localhost,127.0.0.1"}
    mine = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}  # the kernel sets its own
    return mine | proxies | {"IPYTHONDIR": profile}


def _value(answer: dict[str, object], cell_index: int) -> dict[str, Any]:
    match answer:
        case {"status": "ok", "data": {"text/plain": str(text)}}:
            said: dict[str, Any] = json.loads(ast.literal_eval(text))
            return said
        case _:
            raise RuntimeError(f"cell {cell_index} draws, but its value is no figure; end it with the figure's name")
