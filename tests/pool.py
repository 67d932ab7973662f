"""Processes that stay: ranks of one gloo world that run one function after the other.

    pool = Pool(4)
    results = pool.run(function, argument)      # one result per rank
    pool.close()

To start processes and connect them takes longer than most tests of values. Functions must be importable: top level of a
helper module in this folder, plain arguments. After a failure the processes are replaced, as others may hang in it.
"""

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from processes import fork_server
from timeouts import TIMEOUT_S

T = TypeVar("T")


class Pool:
    """The ranks of one world; they start when they are first needed."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        self._children: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._n_starts = 0

    def run(self, function: Callable[..., T], *args: object) -> list[T]:
        """Call a function on every rank, and return what each returned."""
        if not self._children:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        try:
            return self._results(function.__name__)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        deadline_s = time.monotonic() + 5.0
        for child in self._children:
            child.join(max(0.0, deadline_s - time.monotonic()))
        self._kill()
        self._folder.cleanup()

    def _results(self, name: str) -> list[T]:
        deadline_s = time.monotonic() + TIMEOUT_S
        answers: dict[int, T] = {}
        late = dict(enumerate(self._pipes))
        while late:
            ready = wait(late.values(), timeout=max(0.0, deadline_s - time.monotonic()))
            assert ready, f"{name}: ranks {list(late)} do not answer"
            for rank in [rank for rank, pipe in late.items() if pipe in ready]:
                done, answers[rank] = late.pop(rank).recv()
                assert done, f"{name} failed on rank {rank}:\n{answers[rank]}"
        return [answers[rank] for rank in range(self.world_size)]

    def _start(self) -> None:
        context = fork_server()
        self._n_starts += 1
        store = Path(self._folder.name, f"store-{self._n_starts}")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(rank, self.world_size, str(store), theirs))
            child.start()
            theirs.close()
            self._children.append(child)
            self._pipes.append(ours)

    def _kill(self) -> None:
        for child in self._children:
            child.kill()
            child.join()
        for pipe in self._pipes:
            pipe.close()
        self._children, self._pipes = [], []


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timeout
    )
    with suppress(EOFError):  # the test process has ended
        while (task := pipe.recv()) is not None:
            function, args = task
            try:
                answer = True, function(*args)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send(answer)
    os._exit(0)  # the others may be gone, so a clean exit would wait for them
