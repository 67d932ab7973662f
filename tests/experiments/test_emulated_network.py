"""The emulated cluster: links limit what crosses them, and nothing of it stays, however its owner ends."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from scripts import ROOT, load_script

from simdist.errors import RunError

FOLDER = ROOT / "experiments" / "emulated_cluster"
TIMEOUT_S = 60.0


network = load_script(FOLDER / "network.py")
REASON = network.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

RECEIVE = """
    import socket, time
    server = socket.create_server(("", int(sys.argv[1])))
    print("ready", flush=True)
    connection = server.accept()[0]
    print("connected", flush=True)
    nbytes, begin_s = len(connection.recv(1)), time.monotonic()
    while part := connection.recv(1 << 20):
        nbytes += len(part)
    print("received", nbytes, begin_s, time.monotonic(), flush=True)
"""
SEND = """
    import pathlib, socket, time
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
        while not pathlib.Path(sys.argv[4]).exists():
            time.sleep(0.002)
        connection.sendall(bytes(int(sys.argv[3])))
"""
BUILD = """
    import time
    sys.path.insert(0, sys.argv[1])
    import network
    with network.cluster(2, rate_bps=1e8) as nodes:
        process = nodes[0].run(["sh", "-c", "setsid sleep 1000 & setsid sleep 1000"])
        print(nodes[0].name, flush=True)
        time.sleep(1000)
"""


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", "import sys\n" + textwrap.dedent(script), *arguments]


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def namespaces_of(pid: int) -> set[str]:
    return {name for name in namespaces() if re.match(rf"simdist-emulated-{pid}-", name)}


def pids_of(node) -> list[str]:
    return subprocess.run(["ip", "netns", "pids", node.name], capture_output=True, text=True, check=True).stdout.split()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(word: str, printed: list[Path]) -> list[list[str]]:
    """Return the lines with this first word, one of each file, split; a line still being written is none."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        lines = [line for path in printed for line in path.read_text().splitlines(keepends=True)]
        found = [line.split() for line in lines if line.endswith("\n") and line.split()[0] == word]
        if len(found) == len(printed):
            return found
        time.sleep(0.01)
    raise AssertionError([path.read_text() for path in printed])


def rate_Bps(nodes, pairs: list[tuple[int, int]], nbytes: int, folder: Path) -> float:
    """Let pairs of nodes (sender, receiver) send at once, and return what they receive together."""
    folder.mkdir()
    go, printed, processes = folder / "go", [folder / str(index) for index in range(len(pairs))], []
    ports = [str(2000 + index) for index in range(len(pairs))]
    for path, port, (_, receiver) in zip(printed, ports, pairs, strict=True):
        with path.open("wb") as output:
            processes.append(nodes[receiver].run(python(RECEIVE, port), output=output))
    wait_for("ready", printed)
    for port, (sender, receiver) in zip(ports, pairs, strict=True):
        processes.append(nodes[sender].run(python(SEND, nodes[receiver].address, port, str(nbytes), str(go))))
    wait_for("connected", printed)
    go.touch()
    received = [[float(word) for word in line[1:]] for line in wait_for("received", printed)]
    assert [process.wait(TIMEOUT_S) for process in processes] == [0] * len(processes)
    total_nbytes, begins_s, ends_s = zip(*received, strict=True)
    return sum(total_nbytes) / (max(ends_s) - min(begins_s))


@pytest.fixture
def builder():
    """Another process with a cluster; and its first node's name and processes."""
    process = subprocess.Popen(python(BUILD, str(FOLDER)), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        name = process.stdout.readline().strip()
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(pids := pids_of(network.Node(0, name, "", 1e9))) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        yield process, [int(pid) for pid in pids]
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        process.stdout.close()
        network.clean(process.pid)


@pytest.mark.parametrize("pairs", [[(1, 0), (2, 0)], [(0, 1), (0, 2)]], ids=["into one node", "out of one node"])
def test_link_of_a_node_limits_what_it_exchanges_with_several(pairs, tmp_path):
    """The links of the other two alone would allow twice the rate."""
    limit_Bps, rates = 2e6, []
    with network.cluster(3, rate_bps=8 * limit_Bps) as nodes:
        while not rates or (rates[-1] < limit_Bps / 2 and len(rates) < 3):  # others may hold the machine up
            rates.append(rate_Bps(nodes, pairs, nbytes=400_000, folder=tmp_path / str(len(rates))))
    assert limit_Bps / 2 < rates[-1] < 1.25 * limit_Bps


def test_nodes_are_apart_from_the_host_and_on_one_network():
    with network.cluster(2, rate_bps=1e8) as nodes:
        assert [node.address for node in nodes] == ["10.77.0.1", "10.77.0.2"]
        devices = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
        assert not {"bridge", "port0", "port1"} & {line.split()[0].split("@")[0] for line in devices.splitlines()}


def test_everything_is_removed_after_success():
    with network.cluster(2, rate_bps=1e8) as nodes:
        assert {node.name for node in nodes} <= namespaces_of(os.getpid())
        assert len(namespaces_of(os.getpid())) == 3
        process = nodes[1].run(["sh", "-c", "setsid sleep 1000 & setsid sleep 1000"])
    assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert not namespaces_of(os.getpid())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_everything_is_removed_after_an_error(error):
    with pytest.raises(error), network.cluster(2, rate_bps=1e8):
        raise error
    assert not namespaces_of(os.getpid())


def test_half_a_cluster_is_removed(monkeypatch):
    def fail(node, switch, **_):
        raise RunError("no more links")

    monkeypatch.setattr(network, "_connect", fail)
    with pytest.raises(RunError, match="no more links"), network.cluster(2, rate_bps=1e8):
        raise AssertionError
    assert not namespaces_of(os.getpid())


def test_two_clusters_of_one_process_do_not_meet():
    with network.cluster(1, rate_bps=1e8) as first:
        with network.cluster(1, rate_bps=1e8) as second:
            assert first[0].name != second[0].name
        assert len(namespaces_of(os.getpid())) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_everything_is_removed_when_the_builder_is_told_to_end(builder, number):
    process, pids = builder
    assert len(namespaces_of(process.pid)) == 3
    process.send_signal(number)
    assert process.wait(TIMEOUT_S) != 0
    assert not namespaces_of(process.pid)
    assert not any(is_running(pid) for pid in pids)


def test_clean_removes_what_the_dead_left_and_nothing_of_the_living(builder):
    process, pids = builder
    process.kill()
    process.wait(TIMEOUT_S)
    left = namespaces_of(process.pid)
    assert len(left) == 3
    assert any(is_running(pid) for pid in pids)
    with network.cluster(1, rate_bps=1e8) as nodes:
        assert left <= set(network.clean())
        assert nodes[0].name in namespaces()
    assert not namespaces_of(process.pid)
    assert not any(is_running(pid) for pid in pids)


def test_signals_are_handled_as_before_afterwards():
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with network.cluster(1, rate_bps=1e8):
        pass
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize(
    ("nodes", "rate_bps", "servers_bps", "message"),
    [(0, 1e8, [], "not 0"), (251, 1e8, [], "not 251"), (249, 1e8, [1e8] * 2, "not 251"), (2, 1e8, [50], "not 50")],
)
def test_cluster_that_cannot_be_is_refused(nodes, rate_bps, servers_bps, message):
    with (
        pytest.raises(RunError, match=message),
        network.cluster(nodes, rate_bps=rate_bps, servers_bps=servers_bps),
    ):
        raise AssertionError


def test_failed_command_is_named():
    with pytest.raises(RunError, match=r"`ip netns delete nowhere` failed: .*nowhere"):
        network._do("ip netns delete nowhere")


class TestLaunch:
    """With a stand-in for torchrun in all but one test: it takes seconds to start."""

    @pytest.fixture
    def plain(self, monkeypatch):
        def start(node, nodes, ranks_per_node, port):
            return [sys.executable, "-c"]

        monkeypatch.setattr(network, "_torchrun", start)

    @pytest.fixture
    def nodes(self):
        with network.cluster(2, rate_bps=1e8) as nodes:
            yield nodes

    @pytest.mark.sentinel
    @pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
    def test_every_node_starts_its_ranks(self, nodes, tmp_path):
        script = tmp_path / "tell.py"
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
        script.write_text(f"import os\nprint('rank', *(os.environ[name] for name in {names}), flush=True)\n")
        printed = network.launch(nodes, 1, [str(script)], timeout_s=TIMEOUT_S, scheduling="batch")
        ranks = [[line for line in text.splitlines() if line.startswith("rank")] for text in printed]
        assert ranks == [["rank 0 0 2 10.77.0.1 eth0"], ["rank 1 0 2 10.77.0.1 eth0"]]

    @pytest.mark.parametrize(("scheduling", "policy"), [("realtime", os.SCHED_RR), ("batch", os.SCHED_BATCH)])
    def test_ranks_run_under_the_policy_that_was_asked_for(self, plain, nodes, scheduling, policy):
        script = "import os; print(os.sched_getscheduler(0))"
        assert network.launch(nodes, 1, [script], timeout_s=TIMEOUT_S, scheduling=scheduling) == [f"{policy}\n"] * 2

    def test_late_nodes_are_named_and_nothing_of_them_stays(self, plain, nodes):
        script = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '1000']); time.sleep(1000)"
        with pytest.raises(RunError, match="node 0 of 2 was not done after 1 s") as caught:
            network.launch(nodes, 1, [script], timeout_s=1.0)
        assert "node 1 of 2 was not done" in str(caught.value)
        assert not [pid for node in nodes for pid in pids_of(node)]

    def test_failure_ends_the_others_and_shows_what_was_printed(self, plain, nodes, monkeypatch):
        monkeypatch.setattr(network, "_GRACE_S", 0.1)
        script = f"""import os, sys, time
if '{nodes[1].name}' in os.popen('ip netns identify').read():
    sys.exit('no memory')
time.sleep(1000)"""
        with pytest.raises(RunError, match="node 1 of 2 failed with exit status 1; it printed:\nno memory"):
            network.launch(nodes, 1, [script], timeout_s=TIMEOUT_S)
        assert not [pid for node in nodes for pid in pids_of(node)]

    def test_failure_of_all_nodes_is_told_of_each(self, plain, nodes):
        with pytest.raises(RunError, match="node 0 of 2 failed with exit status 3") as caught:
            network.launch(nodes, 1, ["raise SystemExit(3)"], timeout_s=TIMEOUT_S)
        assert "node 1 of 2 failed with exit status 3" in str(caught.value)

    def test_processes_of_others_are_spared(self, plain, nodes):
        other = nodes[0].run(["sleep", "1000"])
        network.launch(nodes, 1, ["pass"], timeout_s=TIMEOUT_S)
        assert other.poll() is None
        other.kill()
        other.wait(TIMEOUT_S)
