"""Perform on the emulated cluster what a scenario says of links: `python -m real --links links:perform`.

The buckets at both ends of a node's link follow the shares of its network card; other jobs' flows are sent by processes
of their own. Each node performs what its own card does and what it sends itself, by the clock of its ranks.

* **A share** changes the rate of a bucket. In an outage the bucket keeps all packets, at 8 bit/s. It would not look
  again before the next packet comes, so one is sent across when the outage is over.
* **Other jobs' flows** share fairly: behind the bucket, packets to their port wait in a queue of their own, and both
  queues are served in turn (HTB with equal quanta, and rates that never limit). In one queue, who has more packets in
  it gets more of the link: at 400 Mbit/s a message of 5 MB took 2.33 times as long beside another flow, with two
  queues 2.00. Little of an endless flow is under way at a time, so that little comes after its end.
"""

import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from heapq import merge

from network import ADDRESS, BACKGROUND_PORT, CLUSTER, bucket

from real.recording.timing import now_s, sleep_s
from simdist.cost.costs import Resources
from simdist.cost.traffic import Background, Traffic
from simdist.errors import RunError

_OUTAGE_BPS = 8.0
_WAKING_PACKETS, _WAKING_S = 5, 0.01
_RECEIVE = """
import socket, sys, threading
def take(peer):
    content = bytearray(1 << 18)
    while peer.recv_into(content):
        pass
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("ready", flush=True)
    while True:
        threading.Thread(target=take, args=(server.accept()[0],), daemon=True).start()
"""
_SEND = """
import itertools, json, socket, sys, time
flights = map(json.loads, sys.stdin)
first = next(flights, None)  # all nodes listen once the run begins
if first is None:
    sys.exit()
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as peer:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    chunk = bytes(65536)
    for begin_s, nbytes, end_s in itertools.chain([first], flights):
        time.sleep(max(begin_s - time.perf_counter(), 0.0))
        while nbytes > 0 and time.perf_counter() < end_s:
            nbytes -= peer.send(chunk[: int(min(nbytes, len(chunk)))])
"""


@contextmanager
def perform(traffic: Traffic, resources: Resources, node: int) -> Iterator[Callable[[float], None]]:
    """Perform what a node's network card does, and send what other jobs send from it.

    Args:
        traffic: Of network cards only.
        resources: What the numbers in `traffic` mean.
        node: The node that this process is on.

    Yields:
        To be called with the moment that the run begins, by `now_s`; what holds from the beginning holds already.

    Raises:
        RunError: The emulated cluster has no such link.
    """
    about = json.loads(os.environ[CLUSTER])
    over = threading.Event()
    with ExitStack() as stack:
        stack.enter_context(_process([sys.executable, "-c", _RECEIVE, str(BACKGROUND_PORT)], ready=True))
        cards = _Cards(stack, about, node, _rates(traffic, resources, node))
        senders = [_Sender(stack, each, resources) for each in traffic.background if _sender(each, resources) == node]

        def begin(start_s: float) -> None:
            performing = [threading.Thread(target=cards.follow, args=(start_s, over), daemon=True)]
            performing += [threading.Thread(target=each.follow, args=(start_s, over), daemon=True) for each in senders]
            for each in performing:
                each.start()

        try:
            yield begin
        finally:
            over.set()


_Rate = tuple[float, int, str, float]  # from when, which of the disturbances, resource, its share then


def _rates(traffic: Traffic, resources: Resources, node: int) -> list[Iterator[_Rate]]:
    """Return what each disturbance does to the network card of a node, in order of time."""

    def of(number: int, resource: int) -> Iterator[_Rate]:
        name = resources.name(resource)
        return ((at_s, number, name, share) for at_s, share in traffic.shares[number].shares())

    found = []
    for number, each in enumerate(traffic.shares):
        for resource in each.resources:
            if not re.fullmatch(r"nic_(in|out)\[\d+\]", name := resources.name(resource)):
                raise RunError(f"{name}: the emulated cluster disturbs network cards only: link: nic")
            if name in _names(node):
                found.append(of(number, resource))
    return found


def _names(node: int) -> tuple[str, str]:
    return f"nic_out[{node}]", f"nic_in[{node}]"


class _Cards:
    """The buckets at both ends of a node's link."""

    def __init__(self, stack: ExitStack, about: dict[str, str], node: int, rates: list[Iterator[_Rate]]) -> None:
        prefix = about["prefix"]
        own, switch = f"{prefix}node{node}", f"{prefix}switch"
        self._rate_bps = float(about["rate_bps"])
        self._device = dict(zip(_names(node), ("eth0", f"port{node}"), strict=True))
        self._tc = {
            name: stack.enter_context(_process(["tc", "-n", namespace, "-batch", "-"]))
            for name, namespace in zip(_names(node), (own, switch), strict=True)
        }
        self._other = ADDRESS.format(2 if node == 0 else 1)
        self._shares: dict[str, dict[int, float]] = {name: {} for name in _names(node)}
        self._rates = merge(*rates)
        self._next = next(self._rates, None)
        self._apply_until(0.0)
        stack.callback(self._repair)

    def follow(self, start_s: float, over: threading.Event) -> None:
        """Change the rates at their times."""
        while self._next is not None and not over.is_set():
            sleep_s(start_s + self._next[0] - now_s(), over)
            if not over.is_set():
                self._apply_until(self._next[0])

    def _apply_until(self, at_s: float) -> None:
        changed: dict[str, bool] = {}
        while self._next is not None and self._next[0] <= at_s:
            _, number, name, share = self._next
            changed.setdefault(name, self._is_out(name))
            self._shares[name][number] = share
            self._next = next(self._rates, None)
        for name in changed:
            self._set(name, math.prod(self._shares[name].values()))
        if any(was_out and not self._is_out(name) for name, was_out in changed.items()):
            self._wake()

    def _is_out(self, name: str) -> bool:
        return math.prod(self._shares[name].values()) == 0

    def _set(self, name: str, share: float) -> None:
        rate_bps = max(share * self._rate_bps, _OUTAGE_BPS)
        line = f"qdisc change dev {self._device[name]} root handle 1: tbf {bucket(rate_bps, self._rate_bps)}\n"
        tc = self._tc[name].stdin
        assert tc is not None
        tc.write(line.encode())
        tc.flush()

    def _wake(self) -> None:
        """Send packets across the own card; what answers that nobody listens comes back through it.

        `tc` does what it is told a moment later.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _ in range(_WAKING_PACKETS):
                sock.sendto(b"", (self._other, 9))
                sleep_s(_WAKING_S)

    def _repair(self) -> None:
        for name in self._tc:
            self._set(name, 1.0)
        self._wake()


class _Sender:
    """Sends the flows of another job."""

    def __init__(self, stack: ExitStack, background: Background, resources: Resources) -> None:
        self._flights = background.flights()
        address = ADDRESS.format(_receiver(background, resources) + 1)
        command = [sys.executable, "-c", _SEND, address, str(BACKGROUND_PORT)]
        self._process = stack.enter_context(_process(command))

    def follow(self, start_s: float, over: threading.Event) -> None:
        """Hand the flows on shortly before they begin."""
        pipe = self._process.stdin
        assert pipe is not None
        for flight in self._flights:
            sleep_s(start_s + flight.begin_s - 0.5 - now_s(), over)
            if over.is_set():
                return
            nbytes = 1e18 if flight.nbytes is None else flight.nbytes
            end_s = 1e18 if flight.end_s is None else start_s + min(flight.end_s, 1e18)
            pipe.write(json.dumps([start_s + flight.begin_s, nbytes, end_s]).encode() + b"\n")
            pipe.flush()


def _sender(background: Background, resources: Resources) -> int:
    return _end(background, resources, "nic_out")


def _receiver(background: Background, resources: Resources) -> int:
    return _end(background, resources, "nic_in")


def _end(background: Background, resources: Resources, kind: str) -> int:
    """Return the node at one end of a flow."""
    for resource in background.stage.resources:
        if found := re.fullmatch(rf"{kind}\[(\d+)\]", resources.name(int(resource))):
            return int(found[1])
    raise RunError("background on the emulated cluster goes from node to node")


@contextmanager
def _process(command: list[str], *, ready: bool = False) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process that takes lines; it ends with the block."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if ready else None) as process:
        try:
            if ready and process.stdout is not None and not process.stdout.readline():
                raise RunError(f"{command[0]} does not start")
            yield process
        finally:
            process.kill()
