"""Lets nodes of the emulated cluster fail, and their links: `python -m real RUN --failures node_failures:fail`."""

import json
import os
import signal
import subprocess
import threading

from network import CLUSTER

from simdist.plan.failures import StepFailure


def fail(failure: StepFailure) -> None:
    """Cut this node's link; then let all its processes end, or mend the link after the failure's time.

    Processes that end behind a cut link say goodbye to nobody, as those of a machine without power.
    """
    set_link(os.environ[CLUSTER], "down")
    if failure.kind == "lost":
        os.kill(os.getppid(), signal.SIGKILL)  # the agent, and with it all processes of the node: see `agents`
        os.kill(os.getpid(), signal.SIGKILL)
    mending = threading.Timer(failure.pause_s, set_link, (os.environ[CLUSTER], "up"))
    mending.daemon = True
    mending.start()


def set_link(about: str, state: str) -> None:
    """Set the link of a node `up` or `down`, at the switch.

    Args:
        about: `network.Node.about` of the node.
        state: `up` or `down`.
    """
    node = json.loads(about)
    command = ["ip", "-n", f"{node['prefix']}switch", "link", "set", f"port{node['index']}", state]
    subprocess.run(command, check=True, timeout=10.0)
