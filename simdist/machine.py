"""What this machine has."""

import os
from pathlib import Path


def n_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_nbytes() -> int:
    """Return the memory that is free, with what the kernel would give up: file pages that can be read again."""
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS knows no other
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    except OSError:
        rows = {}
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") + 1024 * int(rows.get("Cached", "0").split()[0])
