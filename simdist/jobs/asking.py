"""Questions to programs of `real`, which run in processes of their own because they import torch.

simdist knows only their input and output. A program reads one JSON object from standard input and writes lines of JSON.
A line with the key `error` says why it ends. Its exit code is then 2 for wrong input, else 1.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from simdist.errors import RunError, ScenarioError

_NO_TORCH = "No module named 'torch'"


def ask(
    command: Sequence[str], request: Mapping[str, Any], *, what: str, time_limit_s: float, shows_output: bool = False
) -> list[dict[str, Any]]:
    """Return the lines that a program writes in answer to a request.

    Args:
        command: The program and its arguments.
        request: Its input.
        what: Beginning of errors.
        time_limit_s: Seconds until the program is ended.
        shows_output: Pass on what it writes to standard error.

    Raises:
        ScenarioError: The program refuses the request.
        RunError: The program fails.
        subprocess.TimeoutExpired: It is not done in time. Its lines so far are in `stdout`.
    """
    # Import the same packages as this process, not files of the current folder.
    paths = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env = os.environ | paths | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, input=json.dumps(request).encode(), capture_output=True, timeout=time_limit_s, env=env
    )
    lines = parse_lines(ended.stdout)
    if shows_output:
        sys.stderr.write(ended.stderr.decode(errors="replace"))
    if lines and (ended.returncode == 0 or "diverged" in lines[-1]):
        return lines
    told = ended.stderr.decode(errors="replace").splitlines()
    said = [str(each["error"]) for each in lines if "error" in each] or told
    code = ended.returncode
    how = f"it ended with code {code}" if code >= 0 else f"it was killed by signal {-code}, for want of memory perhaps"
    why = next((line for line in reversed(said) if line.strip()), how)
    if why.endswith(_NO_TORCH):
        why = "needs torch, which is not installed: pip install 'simdist-training[real]'"
    raise (ScenarioError if code == 2 else RunError)(f"{what}: {why}")


def parse_lines(text: bytes) -> list[dict[str, Any]]:
    """Return the parsed lines, without an incomplete last line and without other output."""
    return [json.loads(line) for line in text.split(b"\n")[:-1] if line.startswith(b"{")]
