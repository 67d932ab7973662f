"""What this machine has, and what this process takes of it."""

import os
from pathlib import Path


def n_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_nbytes() -> int:
    """Return the memory that is free, with what the kernel would give up: file pages that can be read again."""
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS knows no other
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") + _nbytes("/proc/meminfo", "Cached")


def process_nbytes() -> int:
    """Return the most memory that this process has had; Linux counts in `ru_maxrss` that of who started it, too."""
    import resource  # of POSIX only

    return _nbytes("/proc/self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _nbytes(path: str, key: str) -> int:
    """Return a size that a file of Linux tells in kB; 0 if it does not."""
    try:
        rows = dict(line.split(":", 1) for line in Path(path).read_text(encoding="utf-8").splitlines())
    except OSError:
        return 0
    return 1024 * int(rows.get(key, "0").split()[0])
