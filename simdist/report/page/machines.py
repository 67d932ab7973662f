"""What `real.json` says of the machines that a trace was measured on."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from simdist.errors import TraceError


@dataclass(frozen=True, slots=True)
class Machines:
    """Where and with what a run was measured.

    Args:
        program: What computed, such as `emulated`.
        backend: Of torch.distributed, such as `gloo`.
        device: Its name.
        hosts: Ranks by host.
        versions: Of what it ran with, such as torch.
    """

    program: str
    backend: str
    device: str
    hosts: dict[str, int]
    versions: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "Machines":
        """Read it; what is missing is `unknown`.

        Raises:
            TraceError: The file is damaged.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TraceError(f"{path}: cannot be read ({error}); delete it, or measure the run again") from None
        if not isinstance(found, dict):
            raise TraceError(f"{path}: holds no object of JSON; delete it, or measure the run again")
        hosts, versions = found.get("hosts"), found.get("versions")
        program, backend, device = (str(found.get(name) or "unknown") for name in ("program", "backend", "device"))
        return cls(
            program,
            backend,
            device,
            hosts=dict(Counter(map(str, hosts))) if isinstance(hosts, list) else {},
            versions={str(key): str(value) for key, value in versions.items()} if isinstance(versions, dict) else {},
        )
