"""Which machine this is: the GPU, its driver and memory, and the releases that matter."""

import importlib
import platform
import shutil
import subprocess

import common


def run(part: common.Part) -> None:
    """Emit one row of facts; `device` is null where torch finds no GPU."""
    import numpy as np
    import torch

    facts: common.Row = {
        "broken": _broken(),
        "device": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "triton": _release("triton"),
        "cuda": torch.version.cuda,
        "machine": platform.machine(),
        "gpus": 0,
        "driver": None,
        "nccl": None,
    }
    if not part.dry_run and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "gpus": torch.cuda.device_count(),
            "memory_nbytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    part.emit(facts)


def _broken() -> list[str]:
    """Return what is installed and cannot be imported, such as a numba that refuses this numpy."""
    found = []
    for name in ("numba", "real.cli", "real.calibrate", "simdist.cli", "scipy.optimize", "pandas"):
        try:
            importlib.import_module(name)
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


def _release(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
