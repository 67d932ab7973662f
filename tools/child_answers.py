"""What a process of another Python, or of another tree, answers as JSON."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def answer_of(
    who: str,
    command: Sequence[str],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
) -> dict[str, Any]:
    """Run a command and return what it prints.

    Args:
        who: What answers, for errors.
        command: Program and arguments.
        timeout_s: Until it must have ended.
        environ: Its whole environment; that of this process by default.
        folder: Where it runs; where this process does by default.

    Raises:
        RuntimeError: It fails, or takes longer.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environ, cwd=folder, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{who}: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{who}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def differing(first: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the names of what differs, or is missing in one, in their order."""
    names = dict.fromkeys([*first, *other])
    return [name for name in names if first.get(name) != other.get(name)]
