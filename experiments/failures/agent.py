"""torchrun, whose ranks are forks of it: `python agent.py [options of torchrun] -m MODULE ARGUMENTS`.

All nodes share two cores. Four ranks at a time that load torch would take them 6 s, more on a busy machine; on nodes of
their own they would not disturb each other. So an agent loads it once.
"""

import os
import runpy
import signal
import subprocess
import sys
import traceback
from typing import Any

import torch._dynamo  # noqa: F401 (with the first optimizer)
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


if __name__ == "__main__":
    SubprocessHandler._popen = _fork  # type: ignore[method-assign,assignment]
    main(sys.argv[1:])
