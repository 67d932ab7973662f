"""What a machine and a job say about themselves: nodes and ranks by their launcher, GPUs by `nvidia-smi`."""

import re
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os import killpg
from typing import TypeAlias

#: A number, and the name of the variable or program that states it.
_Stated: TypeAlias = tuple[int, str]

_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
_TIMEOUT_S = 10.0
_MOST_SHOWN = 120  # characters of what a program or a variable says
_PRESETS = (  # what nvidia-smi calls a GPU, and the cluster of such GPUs; cards for PCIe are in none
    (r"\bB200\b(?!.*(PCIe|NVL))", "dgx-b200"),
    (r"\bH200\b(?!.*(PCIe|NVL))", "dgx-h200"),
    (r"\bH100\b.*HBM3$", "dgx-h100"),
    (r"\bA100-SXM4-80GB", "dgx-a100"),
    (r"\bA100-SXM4-40GB", "aws-p4d"),
    (r"\bV100-SXM2", "v100x8-25gbit"),
    (r"\bT4$", "gcp-t4x4-32gbit"),
)


@dataclass(frozen=True)
class Launched:
    """Nodes and ranks of a job, as its launcher states them in environment variables.

    Args:
        nodes: Number of nodes; None if it is not stated.
        per_node: Ranks, or GPUs, of a node; None if it is not stated.
        ignored: Variables that cannot be used, and why.
    """

    nodes: _Stated | None = None
    per_node: _Stated | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpus:
    """GPUs of this machine.

    Args:
        names: Name of each, as `nvidia-smi` prints it.
        problem: Why there is none.
    """

    names: tuple[str, ...] = ()
    problem: str = ""

    @property
    def kind(self) -> str:
        """The name of most of them; empty without GPUs."""
        return Counter(self.names).most_common(1)[0][0] if self.names else ""

    def __str__(self) -> str:
        """Return numbers and names, such as `8 x NVIDIA H200`."""
        return ", ".join(f"{n} x {name}" for name, n in Counter(self.names).most_common())


@dataclass
class _Variables:
    """Reads numbers from environment variables, and remembers those that are none."""

    environ: Mapping[str, str]
    ignored: list[str] = field(default_factory=list)

    def number(self, *names: str) -> _Stated | None:
        """Return the first that is stated: `8`, `a100:8`, or `8(x4)` of Slurm."""
        for name in names:
            text = self.environ.get(name, "").strip()
            found = re.fullmatch(r"(?:[\w.-]+:)*(\d{1,9})(?:\(x\d+\))?(?:\([^()]*\))?", text, re.ASCII)
            if found and int(found[1]):
                return int(found[1]), name
            if text:
                self.ignored.append(f"{name} is {text[:_MOST_SHOWN]!r}, no number of nodes, ranks or GPUs")
        return None


def launched(environ: Mapping[str, str]) -> Launched:
    """Return what torchrun, Slurm or Open MPI state, in this order.

    >>> job = launched({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"})
    >>> job.nodes, job.per_node
    ((2, 'WORLD_SIZE / LOCAL_WORLD_SIZE'), (8, 'LOCAL_WORLD_SIZE'))
    """
    read = _Variables(environ)
    of_torchrun = _divided(read, "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if of_torchrun:
        return Launched(*of_torchrun, tuple(read.ignored))
    nodes = read.number("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if nodes:
        names = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        return Launched(nodes, read.number(*names), tuple(read.ignored))
    of_mpi = _divided(read, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    n_nodes, per_node = of_mpi or (None, None)
    return Launched(n_nodes, per_node, tuple(read.ignored))


def _divided(read: _Variables, of_all: str, of_node: str) -> tuple[_Stated, _Stated] | None:
    """Return nodes, and ranks of each, from two variables of ranks."""
    world = read.number(of_all)
    local = read.number(of_node)
    if world is None or local is None:
        return None
    if world[0] % local[0]:
        read.ignored.append(f"{of_all} {world[0]} is no multiple of {of_node} {local[0]}: nodes differ")
        return None
    return (world[0] // local[0], f"{of_all} / {of_node}"), local


def visible_gpus(environ: Mapping[str, str]) -> _Stated | None:
    """Return how many GPUs `CUDA_VISIBLE_DEVICES` lists; None if it lists none."""
    listed = [each for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    return (len(listed), "CUDA_VISIBLE_DEVICES") if listed and "-1" not in listed else None


def gpus() -> Gpus:
    """Ask `nvidia-smi` for the GPUs of this machine; it gets 10 s."""
    try:
        asked = subprocess.Popen(  # in a group of its own, which can be ended as a whole
            _NVIDIA_SMI,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError:
        return Gpus(problem="there is no nvidia-smi here")
    except OSError as error:
        return Gpus(problem=f"nvidia-smi cannot be run: {error.strerror or error}")
    with asked:
        try:
            printed, _ = asked.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Gpus(problem=f"nvidia-smi did not answer within {_TIMEOUT_S:g} s")
        finally:
            with suppress(ProcessLookupError):
                killpg(asked.pid, signal.SIGKILL)
    lines = [line.strip() for line in printed.decode(errors="replace").splitlines() if line.strip()]
    if asked.returncode or not lines:
        said = f": {lines[0][:_MOST_SHOWN]}" if lines else ""
        return Gpus(problem=f"nvidia-smi {'failed' if asked.returncode else 'lists no GPU'}{said}")
    return Gpus(tuple(line[:_MOST_SHOWN] for line in lines))


def preset_of(gpu: str) -> str | None:
    """Return the cluster that has a GPU; None if no preset has it.

    >>> preset_of("NVIDIA H100 80GB HBM3"), preset_of("NVIDIA H100 PCIe")
    ('dgx-h100', None)
    """
    return next((preset for pattern, preset in _PRESETS if re.search(pattern, gpu, re.IGNORECASE)), None)
