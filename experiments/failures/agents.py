"""One torchrun agent per node of the emulated cluster, and a scheduler that starts those of lost nodes again.

    run(together(nodes, head, COMMAND), nodes, schedule_s=20, timeout_s=600)
    run(apart(nodes, head, COMMAND, RUN), nodes, schedule_s=20, timeout_s=600)      on_failure: continue

What agents share is on the machine `head`, which is never lost. There, agents that start all ranks together have the
store of their rendezvous. When a worker ends, its agent asks the others for a new one. A lost node says nothing:
the others find that by a time-out, and it belongs to the rendezvous until it has not been heard of for `KEEP_ALIVE_S`.
Agents apart know nothing of each other: each starts its own rank again, and ranks meet at the store of the job.

Each node has process numbers of its own, as machines have. All its processes end with its agent.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import network
from node_failures import set_link

from simdist.errors import RunError

KEEP_ALIVE_S = 10
_BEAT_S = 2  # from one sign of life of an agent to the next
_PORT = 29400
_POLL_S = 0.05
START_S = 60.0
LOADED = "SIMDIST_AGENTS_LOADED"  # a folder, with a file from each agent that has loaded torch
N_AGENTS = "SIMDIST_N_AGENTS"
_KILLED = 137  # exit status of the shell after SIGKILL of the agent
_LIVES = '"$@"; exit $?'
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # there is no name server here, and torch would warn of it
_STORE = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
time.sleep(1e6)
"""


@contextmanager
def together(nodes: Sequence[network.Node], head: network.Node, command: Sequence[str]) -> Iterator[list[list[str]]]:
    """Host a rendezvous; give the command of each node, for agents that start all ranks again together.

    Args:
        nodes: Of a cluster.
        head: Machine of the store.
        command: `-m` and a module, and its arguments.
    """
    store = [sys.executable, "-c", _STORE, head.address, str(_PORT)]
    with _serving(head, store):
        options = {
            "nnodes": len(nodes),
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{head.address}:{_PORT}",
            "rdzv-id": "failures",
            "rdzv-conf": (
                f"is_host=false,keep_alive_interval={_BEAT_S},keep_alive_max_attempt={KEEP_ALIVE_S // _BEAT_S},"
                f"join_timeout={START_S:.0f}"
            ),
        }
        # Ranks are in the order of addresses.
        yield [[*_torchrun({**options, "local-addr": node.address}), *command] for node in nodes]


@contextmanager
def apart(
    nodes: Sequence[network.Node], head: network.Node, command: Sequence[str], run_path: str
) -> Iterator[list[list[str]]]:
    """Host the store of a job; give the command of each node, for agents that start only their own replica again.

    Args:
        nodes: Of a cluster.
        head: Machine of the store.
        command: `-m` and a module, and its arguments.
        run_path: The run directory.
    """
    place = f"{head.address}:{_PORT}"
    with _serving(head, [sys.executable, "-m", "real", run_path, "--meet", place]):
        yield [
            [*_torchrun({"standalone": None}), *command, "--meet", place, "--replica", str(number)]
            for number in range(len(nodes))
        ]


def run(
    commands: Sequence[Sequence[str]],
    nodes: Sequence[network.Node],
    *,
    schedule_s: float,
    timeout_s: float,
    environ: Mapping[str, str],
) -> list[str]:
    """Run a command on every node until all have succeeded, and return what each printed.

    Args:
        commands: Agents, one for each node.
        nodes: Of a cluster.
        schedule_s: After which a lost node is there again.
        timeout_s: Until all must have ended.
        environ: Variables of the ranks.

    Raises:
        RunError: Names a node that failed or was late, with the end of what it printed.
    """
    deadline_s = time.monotonic() + timeout_s
    back_at_s: dict[int, float] = {}
    with ExitStack() as stack:
        loaded = stack.enter_context(tempfile.TemporaryDirectory())
        environ = {**environ, LOADED: loaded, N_AGENTS: str(len(nodes))}
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in nodes]
        agents = [_start(*each, environ) for each in zip(nodes, commands, outputs, strict=True)]
        while True:
            now_s = time.monotonic()
            codes = [agent.poll() for agent in agents]
            for index, code in enumerate(codes):
                if code == _KILLED and index not in back_at_s:
                    back_at_s[index] = now_s + schedule_s
                elif code and code != _KILLED:
                    raise RunError(f"node {index} ended with exit status {code}; it printed:\n{_end(outputs[index])}")
            for index in [index for index, at_s in back_at_s.items() if at_s <= now_s]:
                del back_at_s[index]
                set_link(nodes[index].about, "up")
                agents[index] = _start(nodes[index], commands[index], outputs[index], environ)
            if not any(codes) and None not in codes:
                return [_content(output) for output in outputs]
            if now_s > deadline_s:
                late = codes.index(None) if None in codes else next(iter(back_at_s))
                raise RunError(f"node {late} was not done after {timeout_s:g} s; it printed:\n{_end(outputs[late])}")
            time.sleep(_POLL_S)


@contextmanager
def _serving(head: network.Node, command: Sequence[str]) -> Iterator[None]:
    """Keep a server running on a machine. Whoever needs it waits for it."""
    with head.run(network.realtime(command), _QUIET) as server:
        try:
            yield
        finally:
            server.kill()


def _torchrun(options: Mapping[str, object]) -> list[str]:
    """Return a command with real-time priority, as ranks that sleep and communicate have it."""
    own = {"nproc-per-node": 1, "max-restarts": 20}
    written = [f"--{name}" if value is None else f"--{name}={value}" for name, value in {**options, **own}.items()]
    return network.realtime([sys.executable, str(Path(__file__).parent / "agent.py"), *written])


def _start(
    node: network.Node, command: Sequence[str], output: IO[bytes], environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    # A shell is process 1, which cannot be killed from within; when it ends, all processes of the node do.
    own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _LIVES, "sh"]
    # With it, the address of rank 0 is agreed upon at each rendezvous: it may be in another agent.
    settings = {**_QUIET, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    return node.run([*own, *command], {**settings, **environ}, output=output)


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _end(file: IO[bytes]) -> str:
    return "\n".join(_content(file).splitlines()[-40:])
