"""A progress bar on a terminal, for work that lasts.

Short work shows nothing; the bar appears once `after_s` have passed, from a timer, so that it also appears while one
long call into numpy keeps the work from reporting. A stream that is no terminal never sees it.
"""

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO, final

if TYPE_CHECKING:
    import rich.progress

__all__ = ["ProgressBar"]

_REDRAW_S = 0.1


@final
class ProgressBar:
    """A bar with the remaining time; use it in a `with` statement.

    >>> import io
    >>> file = io.StringIO()
    >>> with ProgressBar(file, after_s=0.0) as bar:
    ...     bar.update("sync", 1, 3)
    >>> file.getvalue()  # no terminal
    ''
    """

    def __init__(self, stream: TextIO, *, after_s: float = 2.0) -> None:
        """Draw on `stream` after `after_s` seconds; 0 draws at once."""
        self._stream = stream
        self._after_s = after_s
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._state: tuple[str, float, float | None] = ("", 0.0, None)
        self._drawn_s = 0.0
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> Self:
        """Start to count the time."""
        if self._stream.isatty():
            self._timer = threading.Timer(self._after_s, self._appear)
            self._timer.daemon = True
            self._timer.start() if self._after_s else self._appear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the bar away."""
        with self._lock:
            self._closed = True
        if self._timer:
            self._timer.cancel()
        if self._bar:
            self._bar.stop()

    def update(self, what: str, done: float, total: float | None) -> None:
        """Say what is done now and how far it is; without a `total` nobody knows how long it takes."""
        self._state = what, done, total
        now_s = time.monotonic()
        if self._bar and now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            self._draw(self._bar)

    def _appear(self) -> None:
        bar = _new_bar(self._stream)
        with self._lock:
            if self._closed:
                return
            self._draw(bar)
            bar.start()
            self._bar = bar

    def _draw(self, bar: "rich.progress.Progress") -> None:
        what, done, total = self._state
        task = bar.task_ids[0] if bar.task_ids else bar.add_task(what, total=total)
        bar.update(task, description=what, completed=done, total=total)


def _new_bar(stream: TextIO) -> "rich.progress.Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=stream), transient=True)
