r"""One machine plays a cluster: each node is a network namespace behind a link of limited rate.

    with cluster(4, rate_bps=400e6) as nodes:
        launch(nodes, 2, ["-m", "real", "RUN"], timeout_s=300)

    with cluster(4, rate_bps=400e6, servers_bps=[1e9]) as (*nodes, server):     one more machine, with a link of its own

    node 0: lo, eth0 ==== port0 \
    node 1: lo, eth0 ==== port1  bridge      ==== is a veth pair; a token bucket (tbf) at each end limits one direction
    node 2: lo, eth0 ==== port2 /

Traffic inside a node goes over its loopback and is limited by the processor only. The bridge lives in a namespace of
its own: the network of the host sees nothing of all this, and removing the namespaces removes everything.

Settings that make times repeatable, and close to startup + bytes / rate (measured with gloo, 4 x 2 ranks, 400 Mbit/s):

* The bucket must hold the largest packet. Otherwise the kernel cuts packets into frames, one by one, and keeps a core
  busy with it: an all_reduce of 4 MiB took 199 ms instead of 131 (frames of 1500 bytes).
* A full bucket passes its content at once, so it should be small: with 70 kB, 64 KiB took no longer than 4 KiB. Hence
  packets of 16 KiB at most (GSO), and a bucket that holds one of them. It also makes up for late timers, and must hold
  what passes meanwhile: with 150 us, an all_reduce of 8 MB over 4 x 1 ranks at 800 Mbit/s took 130 ms and three times
  the processor, with 400 us 122.7 ms; its bytes take 120.8.
* Headers and acknowledgements are 1 % of jumbo frames, and 5 % of frames of 1500 bytes.
* gloo's event loop spins while another thread holds its lock. Where threads outnumber cores, the default scheduler runs
  the spinning one until the next tick, 4 ms: an all_reduce of 4 KiB over 8 ranks took 20 ms, with real-time priority 4.
* Congestion control is cubic, as on most machines: two groups on one link then take 1.02 times what their bytes take,
  with bbr up to 1.07.
"""

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Literal, assert_never

from simdist.errors import RunError

Scheduling = Literal["realtime", "batch", "ordinary"]

_PREFIX = "simdist-emulated-"
CLUSTER = "SIMDIST_EMULATED_CLUSTER"
"""Variable that tells ranks which node they are on: prefix of namespaces, number, and rate of its link."""
ADDRESS = "10.77.0.{}"
BACKGROUND_PORT = 7077
"""Where nodes take flows of other jobs; with `fair`, packets to it share links fairly with all others."""

_MARK = "SIMDIST_LAUNCH"  # variable that tells the processes of one launch from others
_MAX_NODES = 250  # addresses end in 1 to 250
_TURN_NBYTES = 20000  # of one queue, then it is the other's turn: one packet
_UNLIMITED = "rate 20gbit burst 1m cburst 1m"  # without cburst, a class that pauses gets less than its turn
_QUEUE_NBYTES = 4_000_000  # never full: no packet was dropped, even with four groups of 16 MiB on one link
_COMMAND_TIMEOUT_S = 30.0
_KILL_TIMEOUT_S = 10.0
_GRACE_S = 10.0  # between the failure of a node and the end of the others, which may know more
_POLL_S = 0.05
_LOOKS = 5
_TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class Links:
    """How links are made.

    Args:
        mtu_nbytes: Bytes of a frame.
        gso_nbytes: Bytes of a packet that the kernel cuts into frames at the last moment.
        bucket_nbytes: Bytes of a token bucket, at least: one packet and its headers.
        bucket_s: The same as seconds of a link's rate, for high rates: what a timer may be late.
        scheduling: Of the ranks.
    """

    mtu_nbytes: int
    gso_nbytes: int
    bucket_nbytes: int
    bucket_s: float
    scheduling: Scheduling


TUNED = Links(9000, 16384, 18000, 400e-6, "realtime")
ORDINARY = Links(1500, 65536, 70000, 1e-3, "ordinary")
"""As a machine comes: usual frames and packets, a bucket of a packet or a tick of the kernel, its own scheduler."""


@dataclass(frozen=True, slots=True)
class Node:
    """Stands for a machine of the emulated cluster.

    Args:
        index: Position in the cluster, from 0.
        name: Of its network namespace.
        address: Of its interface `eth0`.
        rate_bps: Of its link.
    """

    index: int
    name: str
    address: str
    rate_bps: float

    def run(
        self, command: Sequence[str], environ: Mapping[str, str] | None = None, *, output: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on this node, in a session of its own; it ends with the cluster at the latest.

        Args:
            command: Program and arguments.
            environ: Variables, besides those of this process and the interface for gloo.
            output: File for what it prints and reports; this process' own if not given.
        """
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", CLUSTER: self.about, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
        )

    @property
    def about(self) -> str:
        """What `CLUSTER` says on it."""
        prefix = self.name.removesuffix(f"node{self.index}")
        return json.dumps({"prefix": prefix, "index": self.index, "rate_bps": self.rate_bps})


@contextmanager
def cluster(
    nodes: int, rate_bps: float, *, servers_bps: Sequence[float] = (), fair: bool = False, links: Links = TUNED
) -> Iterator[list[Node]]:
    """Build a cluster, and remove it at the end with all that runs on it: also after an error, Ctrl-C or SIGTERM.

    Args:
        nodes: How many, 1 to 250 with the servers.
        rate_bps: Bits per second of each node's link, out and in; headers count. Measured up to 1 Gbit/s.
        servers_bps: The same of machines that come after the nodes, such as file servers.
        links: How they are made.
        fair: Whether packets to `BACKGROUND_PORT` have a queue of their own at each link, both served in turn.

    Raises:
        RunError: names the command that failed.
    """
    if not 1 <= nodes <= _MAX_NODES - len(servers_bps):
        raise RunError(f"an emulated cluster has 1 to {_MAX_NODES} nodes and servers, not {nodes + len(servers_bps)}")
    rates_bps = [*[rate_bps] * nodes, *servers_bps]
    if slow := [each for each in rates_bps if not each >= 1e6]:
        raise RunError(f"an emulated link carries at least 1e6 bit/s, not {slow[0]}")
    prefix = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(3)}-"
    unhandled = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    with _handling(unhandled, _exit):
        try:
            yield _build(prefix, rates_bps, fair=fair, links=links)
        finally:
            with _handling([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], signal.SIG_IGN):
                _remove(_names(prefix))


def launch(
    nodes: Sequence[Node],
    ranks_per_node: int,
    command: Sequence[str],
    *,
    timeout_s: float,
    scheduling: Scheduling = "realtime",
    port: int = 29400,
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """Run `torchrun` on every node, wait for all, and return what each printed; none of their processes stays.

    Args:
        nodes: Of a cluster; the first one is the master.
        ranks_per_node: Processes that each `torchrun` starts.
        command: Script, or `-m` and a module, and its arguments.
        timeout_s: Until all must have ended.
        scheduling: "realtime" for ranks that sleep and communicate: what else computes on the machine hardly disturbs
            them, nor do their own threads that read and decode. "batch" for ranks that compute, which would keep each
            other from a core for 100 ms; it takes a quiet machine. "ordinary" leaves
            all to the ranks and the kernel; what else computes on the machine gets little.
        port: Of the rendezvous, on the first node.
        environ: Variables of the ranks, besides those of this process.

    Raises:
        RunError: names the nodes that failed or were late, with the end of what they printed.
    """
    token = secrets.token_hex(8)
    # There is no name server here, and torch would warn of it.
    marked = {**(environ or {}), _MARK: token, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    mark = f"{_MARK}={token}"
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in nodes]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for node, output in zip(nodes, outputs, strict=True):
                torchrun = _torchrun(node, nodes, ranks_per_node, port)
                processes.append(node.run([*_policy(scheduling), *torchrun, *command], marked, output=output))
            codes = _codes(processes, timeout_s)
        finally:
            for node in nodes:
                _kill(node.name, mark=mark)
            for process in processes:
                process.wait(_KILL_TIMEOUT_S)
        texts = [_content(output) for output in outputs]
    _judge(codes, texts, timeout_s)
    return texts


def realtime(command: Sequence[str]) -> list[str]:
    """Return a command that runs another one as ranks do that sleep and communicate."""
    return [*_policy("realtime"), *command]


def missing() -> str | None:
    """Try a cluster of one node; return why this machine cannot play one, or None if it can."""
    if sys.platform != "linux":
        return f"network namespaces exist on Linux, not on {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces take root"
    lacking = [program for program in ("ip", "tc", "chrt") if shutil.which(program) is None]
    if lacking:
        return f"no program {', '.join(lacking)} (packages iproute2, util-linux)"
    try:
        with cluster(1, rate_bps=1e9) as (node,):
            _do(f"ip netns exec {node.name} {shlex.join(_policy('realtime'))} true")
    except RunError as error:
        return str(error)
    return None


def clean(owner: int | None = None) -> list[str]:
    """Remove what processes left behind that were killed while they had a cluster; return the names of namespaces.

    Args:
        owner: Process whose clusters are removed; of all that have ended, if not given.
    """
    prefix = _PREFIX if owner is None else f"{_PREFIX}{owner}-"
    left = [name for name in _names(prefix) if not _has_owner(name)]
    _remove(left)
    return left


def _build(prefix: str, rates_bps: Sequence[float], *, fair: bool, links: Links) -> list[Node]:
    switch = f"{prefix}switch"
    nodes = [
        Node(index, f"{prefix}node{index}", ADDRESS.format(index + 1), rate_bps)
        for index, rate_bps in enumerate(rates_bps)
    ]
    _do(f"ip netns add {switch}")
    _do(f"ip -n {switch} link add bridge type bridge")
    _do(f"ip -n {switch} link set bridge up")
    for node in nodes:
        _do(f"ip netns add {node.name}")
        _connect(node, switch, fair=fair, links=links)
    return nodes


def bucket(rate_bps: float, most_bps: float, links: Links = TUNED) -> str:
    """Return the settings of a token bucket that now has a rate, of at most `most_bps`."""
    bucket_nbytes = max(links.bucket_nbytes, round(most_bps / 8 * links.bucket_s))
    return f"rate {rate_bps:.0f}bit burst {bucket_nbytes} limit {_QUEUE_NBYTES}"


def _connect(node: Node, switch: str, *, fair: bool, links: Links) -> None:
    port = f"port{node.index}"
    _do(f"ip -n {switch} link add {port} type veth peer name eth0 netns {node.name}")
    _do(f"ip -n {switch} link set {port} master bridge")
    for namespace, interface in ((switch, port), (node.name, "eth0")):
        _do(f"ip -n {namespace} link set {interface} mtu {links.mtu_nbytes} gso_max_size {links.gso_nbytes} up")
        limits = bucket(node.rate_bps, node.rate_bps, links)
        _do(f"tc -n {namespace} qdisc add dev {interface} root handle 1: tbf {limits}")
        if fair:
            _add_queues(f"tc -n {namespace}", interface)
    _do(f"ip -n {node.name} link set lo up")
    _do(f"ip -n {node.name} address add {node.address}/24 dev eth0")
    if "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
        # By route, as a namespace may not choose what the host does not allow to all users.
        _do(f"ip -n {node.name} route change 10.77.0.0/24 dev eth0 src {node.address} congctl cubic")


def _add_queues(tc: str, interface: str) -> None:
    """Give packets to `BACKGROUND_PORT` a queue of their own, and serve both in turn."""
    _do(f"{tc} qdisc add dev {interface} parent 1: handle 2: htb default 1")
    for number in (1, 2):
        rate = f"{_UNLIMITED} quantum {_TURN_NBYTES}"
        _do(f"{tc} class add dev {interface} parent 2: classid 2:{number} htb {rate}")
        _do(f"{tc} qdisc add dev {interface} parent 2:{number} bfifo limit {_QUEUE_NBYTES}")
    match = f"u32 match ip dport {BACKGROUND_PORT} 0xffff flowid 2:2"
    _do(f"{tc} filter add dev {interface} parent 2: protocol ip {match}")


def _remove(namespaces: Sequence[str]) -> None:
    for namespace in namespaces:
        with _unless_gone(namespace):
            _kill(namespace)
    for namespace in namespaces:
        with _unless_gone(namespace):
            _do(f"ip netns delete {namespace}")


@contextmanager
def _unless_gone(namespace: str) -> Iterator[None]:
    """Let others remove a namespace at the same time: `clean` may run in several processes."""
    try:
        yield
    except RunError:
        if namespace in _names(namespace):
            raise


def _kill(namespace: str, *, mark: str | None = None) -> None:
    """End every process of a namespace, whatever session it is in; or those only that inherited a mark."""
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while pids := {pid for pid in _pids(namespace) if mark is None or _is_marked(pid, mark)}:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            raise RunError(f"processes {sorted(pids)} of namespace {namespace} do not end, even when killed")
        time.sleep(_POLL_S)


def _pids(namespace: str) -> set[int]:
    return set(map(int, _do(f"ip netns pids {namespace}").split()))


def _is_marked(pid: int, mark: str) -> bool:
    for _ in range(_LOOKS):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            return False
        if environ:
            return mark.encode() in environ.split(b"\0")
        time.sleep(0.001)  # it becomes another program right now, or has ended and is not collected
    return False


def _names(prefix: str) -> list[str]:
    names = (line.split()[0] for line in _do("ip netns list").splitlines() if line)
    return [name for name in names if name.startswith(prefix)]


def _has_owner(namespace: str) -> bool:
    owner = re.match(rf"{_PREFIX}(\d+)-", namespace)
    return owner is None or Path(f"/proc/{owner[1]}").exists()


def _do(command: str) -> str:
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"`{command}` failed: {error}") from error
    if done.returncode != 0:
        raise RunError(f"`{command}` failed: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def _torchrun(node: Node, nodes: Sequence[Node], ranks_per_node: int, port: int) -> list[str]:
    options = {
        "nnodes": len(nodes),
        "node-rank": node.index - nodes[0].index,
        "nproc-per-node": ranks_per_node,
        "master-addr": nodes[0].address,
        "master-port": port,
    }
    return [sys.executable, "-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in options.items())]


def _policy(scheduling: Scheduling) -> list[str]:
    match scheduling:
        case "realtime":
            return ["chrt", "--rr", "2"]  # `real.recording.timing.give_way` takes 1
        case "batch":
            return ["chrt", "--batch", "0"]
        case "ordinary":
            return ["nice", "-n", "-20"]
        case _:
            assert_never(scheduling)


def _codes(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Wait for all and return their exit statuses, None for those that are late or still run long after a failure."""
    deadline_s = time.monotonic() + timeout_s
    failed = False
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or time.monotonic() > deadline_s:
            return codes
        if not failed and any(codes):
            failed = True
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)


def _judge(codes: Sequence[int | None], texts: Sequence[str], timeout_s: float) -> None:
    failed = [index for index, code in enumerate(codes) if code]
    late = [index for index, code in enumerate(codes) if code is None]
    if failed:
        said = [f"node {index} of {len(codes)} failed with exit status {codes[index]}" for index in failed]
    elif late:
        said = [f"node {index} of {len(codes)} was not done after {timeout_s:g} s" for index in late]
    else:
        return
    ends = ["\n".join(_telling(texts[index].splitlines())) for index in failed or late]
    raise RunError("\n".join(f"{what}; it printed:\n{end}" for what, end in zip(said, ends, strict=True)))


def _telling(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines that say what went wrong: what a rank called an error or raised, else the last ones."""
    told = [line for line in lines if ": error: " in line]
    raised = [line for line in lines if re.match(r"\[rank\d+\]: [\w.]+(Error|Exception)\b", line)]
    return told or raised or lines[-_TAIL_LINES:]


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _handling(
    signals: Collection[signal.Signals], handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    """Handle signals so for a while. Only the main thread can set this, and only it is interrupted by signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(each, signal.signal(each, handler)) for each in signals]
    try:
        yield
    finally:
        for each, previous in before:
            signal.signal(each, previous)


if __name__ == "__main__":
    print("\n".join(clean()) or "nothing was left")
