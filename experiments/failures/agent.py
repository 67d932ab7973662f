"""torchrun, whose ranks are forks of it: `python agent.py [options of torchrun] -m MODULE ARGUMENTS`.

All nodes share two cores. Four ranks at a time that load torch would take them 6 s, more on a busy machine; on nodes of
their own they would not disturb each other. So an agent loads it once, and waits until the others have loaded it too.
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

import torch._dynamo  # noqa: F401 (with the first optimizer)
from agents import LOADED, N_AGENTS, START_S
from sleeping_model import build  # noqa: F401
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from torch.distributed.run import main

import real.cli  # noqa: F401


class _Fork(subprocess.Popen[bytes]):
    """A fork of this process that does as `python -u -m MODULE ARGUMENTS`."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._environment = environment
        super().__init__(command)

    def _execute_child(self, command: list[str], *_: Any) -> None:
        self._child_created = True
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()  # torchrun ends process groups
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(self._environment)
        sys.argv = command[3:]
        code: Any = 0
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork(_: object, command: tuple[str, ...], environment: dict[str, str]) -> _Fork:
    return _Fork(list(command), environment)


def _await_others() -> None:
    """Wait until all agents have loaded what their ranks need; a later one does not wait."""
    folder = os.environ[LOADED]
    os.close(tempfile.mkstemp(dir=folder)[0])
    until_s = time.monotonic() + START_S
    while (n_loaded := len(os.listdir(folder))) < int(os.environ[N_AGENTS]):
        if time.monotonic() > until_s:
            raise SystemExit(f"only {n_loaded} agents have loaded torch within {START_S:g} s")
        time.sleep(0.02)


if __name__ == "__main__":
    _await_others()
    SubprocessHandler._popen = _fork  # type: ignore[method-assign,assignment]
    main(sys.argv[1:])
