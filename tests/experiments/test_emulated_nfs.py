"""The file server of the emulated cluster: what it serves is read as it is, at the rate of its link, and it leaves."""

import os
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from simdist.errors import RunError

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "emulated_cluster"
sys.path.insert(0, str(FOLDER))

import network  # noqa: E402
import nfs  # noqa: E402

TIMEOUT_S = 60.0
REASON = nfs.missing()
needs_nfs = pytest.mark.skipif(REASON is not None, reason=f"no NFS server here: {REASON}")

SERVE = """
    import pathlib, sys, time
    sys.path.insert(0, sys.argv[1])
    import network, nfs
    with network.cluster(1, 1e9, servers_bps=[1e9]) as (node, machine):
        with nfs.serve(pathlib.Path(sys.argv[2]), machine):
            print(machine.name, flush=True)
            time.sleep(1000)
"""


@pytest.fixture
def served(tmp_path):
    """A folder to be served."""
    folder = tmp_path / "served"
    (folder / "deep").mkdir(parents=True)
    (folder / "label.txt").write_text("seven")
    (folder / "deep" / "sample").write_bytes(os.urandom(300_000))
    if subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True).stdout == "overlayfs\n":
        pytest.skip("layers of containers give no handles of files")
    return folder


@pytest.fixture
def machines():
    with network.cluster(2, rate_bps=1e9, servers_bps=[1e9]) as machines:
        yield machines


def reading(node, server, path, target):
    """Start to copy a file that is served."""
    with target.open("wb") as output:
        return node.run(["nfs-cat", server.url(path)], output=output)


def read(node, server, path, folder):
    """Return the content of a file that is served, or None if it cannot be read."""
    target = folder / "read"
    return target.read_bytes() if reading(node, server, path, target).wait(TIMEOUT_S) == 0 else None


def pids_of(name):
    return [int(pid) for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True).stdout.split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def visible():
    """Return what anybody on this machine sees of servers, beside their processes: mounts, and files in /run."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if "ganesha" in line]
    return mounts, {path: path.stat().st_mtime_ns for path in Path("/run").glob("ganesha/*")}


@needs_nfs
def test_every_node_reads_what_is_served(served, machines, tmp_path):
    *nodes, machine = machines
    with nfs.serve(served, machine) as server:
        assert {read(node, server, "label.txt", tmp_path) for node in nodes} == {b"seven"}
        assert read(nodes[1], server, "deep/sample", tmp_path) == (served / "deep" / "sample").read_bytes()


@needs_nfs
def test_a_file_that_is_changed_added_or_removed_is_seen_at_once(served, machines, tmp_path):
    with nfs.serve(served, machines[-1]) as server:
        assert read(machines[0], server, "label.txt", tmp_path) == b"seven"
        (served / "label.txt").write_text("a longer label")
        assert read(machines[0], server, "label.txt", tmp_path) == b"a longer label"
        assert read(machines[0], server, "new.txt", tmp_path) is None
        (served / "new.txt").write_text("new")
        assert read(machines[0], server, "new.txt", tmp_path) == b"new"
        (served / "new.txt").unlink()
        assert read(machines[0], server, "new.txt", tmp_path) is None


@needs_nfs
def test_clients_cannot_write(served, machines, tmp_path):
    (tmp_path / "mine").write_text("mine")
    with nfs.serve(served, machines[-1]) as server:
        written = machines[0].run(["nfs-cp", str(tmp_path / "mine"), server.url("mine")])
        assert written.wait(TIMEOUT_S) != 0
    assert not (served / "mine").exists()


@needs_nfs
def test_link_of_the_server_limits_what_nodes_read_together(served, tmp_path):
    """Each node's own link would allow four times the rate. Others may hold the machine up, so it may try again."""
    limit_Bps, nbytes, rates = 2e6, 500_000, []
    (served / "large").write_bytes(os.urandom(nbytes))
    with (
        network.cluster(2, rate_bps=4 * 8 * limit_Bps, servers_bps=[8 * limit_Bps]) as (*nodes, machine),
        nfs.serve(served, machine) as server,
    ):
        while not rates or (rates[-1] < limit_Bps / 2 and len(rates) < 5):
            begin_s = time.monotonic()
            clients = [reading(node, server, "large", tmp_path / node.name) for node in nodes]
            assert [client.wait(TIMEOUT_S) for client in clients] == [0, 0]
            rates.append(len(nodes) * nbytes / (time.monotonic() - begin_s))
    assert limit_Bps / 2 < rates[-1] < 1.25 * limit_Bps


@needs_nfs
def test_reads_fail_in_an_outage_and_go_on_after_it(served, machines, tmp_path):
    with nfs.serve(served, machines[-1]) as server:
        for _ in range(2):
            assert read(machines[0], server, "label.txt", tmp_path) == b"seven"
            server.stop()
            assert not pids_of(machines[-1].name)
            assert read(machines[0], server, "label.txt", tmp_path) is None
            server.start()
        assert read(machines[0], server, "label.txt", tmp_path) == b"seven"


@needs_nfs
def test_an_outage_cuts_off_who_reads(served, tmp_path):
    (served / "large").write_bytes(bytes(20_000_000))
    with (
        network.cluster(1, rate_bps=1e9, servers_bps=[8e6]) as (node, machine),
        nfs.serve(served, machine) as server,
    ):
        client = reading(node, server, "large", tmp_path / "large")  # it takes 20 s
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (tmp_path / "large").stat().st_size and time.monotonic() < deadline_s:
            time.sleep(0.02)
        server.stop()
        server.start()
        assert client.wait(TIMEOUT_S) != 0
        assert read(node, server, "label.txt", tmp_path) == b"seven"


@needs_nfs
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_of_it_remains_after_success_or_an_error(served, machines, error):
    before = visible()
    with pytest.raises(error) if error else nullcontext(), nfs.serve(served, machines[-1]):
        assert len(pids_of(machines[-1].name)) == 1
        if error:
            raise error
    assert not pids_of(machines[-1].name)
    assert visible() == before


@needs_nfs
def test_nothing_of_it_remains_when_its_owner_was_killed(served):
    before = visible()
    command = [sys.executable, "-c", textwrap.dedent(SERVE), str(FOLDER), str(served)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            name = owner.stdout.readline().strip()
            pids = pids_of(name)
        finally:
            owner.kill()
    network.clean(owner.pid)
    assert len(pids) == 1
    assert not any(is_running(pid) for pid in pids)
    assert name not in namespaces()
    assert visible() == before


@needs_nfs
def test_a_folder_whose_files_have_no_handles_is_refused_with_the_log(machines):
    refused = pytest.raises(RunError, match=r"of /proc cannot serve this folder; .*\n.* :FSAL :CRIT :")
    with refused, nfs.serve(Path("/proc"), machines[-1]):
        raise AssertionError
    assert not pids_of(machines[-1].name)


@needs_nfs
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo no memory; exit 7", "ended with exit status 7"),
        ("echo no memory; exec sleep 1000", "has not answered within"),
    ],
)
def test_a_server_that_does_not_start_shows_its_log(served, machines, monkeypatch, command, message):
    monkeypatch.setattr(nfs, "_START", command)
    if "sleep" in command:
        monkeypatch.setattr(nfs, "_TIMEOUT_S", 1.0)
    with pytest.raises(RunError, match=rf"{message}[^\n]*; it printed:\nno memory$"), nfs.serve(served, machines[-1]):
        raise AssertionError
    assert not pids_of(machines[-1].name)


@needs_nfs
def test_a_folder_that_is_not_there_is_refused(tmp_path, machines):
    with pytest.raises(RunError, match="none: cannot be served"), nfs.serve(tmp_path / "none", machines[-1]):
        raise AssertionError


@pytest.mark.parametrize(("programs", "lacking"), [({"nfs-ls"}, "no ganesha.nfsd"), ({"ganesha.nfsd"}, "no nfs-ls")])
def test_programs_that_are_missing_are_named_with_their_packages(monkeypatch, programs, lacking):
    monkeypatch.setattr(network, "missing", lambda: None)
    monkeypatch.setattr(nfs.shutil, "which", lambda program: program if program in programs else None)
    assert nfs.missing().startswith(lacking)
    assert nfs.missing().endswith("(packages nfs-ganesha, nfs-ganesha-vfs, libnfs-utils)")


def test_a_machine_that_cannot_play_a_cluster_serves_nothing(monkeypatch):
    monkeypatch.setattr(network, "missing", lambda: "network namespaces take root")
    assert nfs.missing() == "network namespaces take root"
