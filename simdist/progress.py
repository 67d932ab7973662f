"""A progress bar on a terminal, for work that lasts.

Short work shows nothing; the bar appears once `after_s` have passed, from a timer, so that it also appears while one
long call into numpy keeps the work from reporting. A stream that is no terminal never sees it; if asked for, it gets a
plain line now and then, as in the log of a batch job.
"""

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO, final

if TYPE_CHECKING:
    import rich.progress


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

    def __init__(self, stream: TextIO, *, after_s: float = 2.0, line_every_s: float | None = None) -> None:
        """Draw on `stream` after `after_s` seconds; 0 draws at once.

        Args:
            stream: Such as stderr.
            after_s: Seconds.
            line_every_s: Seconds between the lines that a stream gets which is no terminal; None prints none.
        """
        self._stream = stream
        self._line_every_s = None if stream.isatty() else line_every_s
        self._printed_s = time.monotonic()
        self._after_s = after_s
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._state: tuple[str, float, float | None] = ("", 0.0, None)
        self._began: tuple[float, float] = (time.monotonic(), 0.0)  # when, and with how much done
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
        if error is None:
            self._state = ("", 0.0, None)
        with self._lock:
            self._closed = True
        if self._timer:
            self._timer.cancel()
        if self._bar:
            self._bar.stop()

    def update(self, what: str, done: float, total: float | None) -> None:
        """Say what is done now and how far it is; without a `total` it is unknown how long it takes."""
        now_s = time.monotonic()
        if total != self._state[2] or done < self._state[1]:  # something else has begun
            self._began = now_s, done
        self._state = what, done, total
        if self._bar and now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            self._draw(self._bar)
        if self._line_every_s is not None and now_s - self._printed_s >= self._line_every_s:
            self._printed_s = now_s
            with suppress(OSError):  # the run goes on
                print(_line(what, done, total, *self._began), file=self._stream, flush=True)

    @property
    def reached(self) -> str:
        """What was done when it was interrupted, and how far it was, such as `sync, 45%`; empty once it is done."""
        what, done, total = self._state
        return f"{what}, {min(done / total, 1.0):.0%}" if total else what

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
        task = bar.task_ids[0] if bar.task_ids else bar.add_task(what, total=total, left="")
        bar.update(task, description=what, completed=done, total=total, left=_left(done, total, *self._began))


def _left(done: float, total: float | None, began_s: float, already: float) -> str:
    """Say how long the rest takes at the mean speed so far.

    rich knows a speed only after two reports that it saw itself; of work that is done in lumps that takes long.
    """
    return _time_left(done - already, total - already, time.monotonic() - began_s) if total else ""


def _time_left(done: float, total: float, passed_s: float) -> str:
    """Say how long the rest takes at the speed so far, such as `1 min 5 s left`; nothing if nothing is done yet.

    >>> _time_left(1, 3, 40.0), _time_left(0, 3, 40.0), _time_left(1, 181, 60.0)
    ('1 min 20 s left', '', '3 h 0 min left')
    """
    if not done:
        return ""
    left_s = int((total - done) * passed_s / done)
    hours = left_s // 3600
    minutes = left_s // 60 % 60
    seconds = left_s % 60
    return f"{f'{hours} h {minutes} min' if hours else f'{minutes} min {seconds} s'} left"


def _line(what: str, done: float, total: float | None, began_s: float, already: float) -> str:
    if not total:
        return what
    left = _left(done, total, began_s, already)
    share = f"{what}: {done / total:.0%}"
    return f"{share}, {left}" if left else share


def _new_bar(stream: TextIO) -> "rich.progress.Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    what = TextColumn("{task.description}", markup=False)
    left = TextColumn("{task.fields[left]}", style="progress.remaining")
    return Progress(what, BarColumn(), TaskProgressColumn(), left, console=Console(file=stream), transient=True)
