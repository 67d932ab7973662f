"""Tells a user who waits why: one line when a storage has been away for a while, and one when it is back."""

import threading
from collections.abc import Callable
from typing import final

PATIENCE_S = 5.0  # shorter outages pass without a word


@final
class Outage:
    """Notes how the reads of a storage go; any number of threads may.

    Args:
        url: Of the storage.
        timeout_s: How long a read is tried.
        tell: Takes a line for the user.
    """

    def __init__(self, url: str, *, timeout_s: float, tell: Callable[[str], object]) -> None:
        self._url, self._timeout_s, self._tell = url, timeout_s, tell
        self._lock = threading.Lock()
        self._since_s: float | None = None
        self._is_told = False

    def note_failure(self, reason: str, *, start_s: float, now_s: float) -> None:
        """Note that a read has failed.

        Args:
            reason: What happened.
            start_s: When the read began.
            now_s: Same clock.
        """
        with self._lock:
            if self._since_s is None:
                self._since_s = start_s
            if self._is_told or now_s - self._since_s < PATIENCE_S:
                return
            self._is_told = True
        self._tell(f"cannot reach {self._url}: {reason}; trying until {self._timeout_s:g} s are over")

    def note_success(self, *, now_s: float) -> None:
        """Note that a read has succeeded."""
        if self._since_s is None:  # nearly always: without a lock
            return
        with self._lock:
            since_s, is_told = self._since_s, self._is_told
            self._since_s, self._is_told = None, False
        if is_told and since_s is not None:
            self._tell(f"{self._url} is back after {now_s - since_s:.2g} s")
