"""The NFS client of the emulated cluster: files as they are, outages survived, and no wait without an end."""

import ctypes
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from data_files import content_of, index_of, write_index
from fsspec.core import url_to_fs
from fsspec.registry import _registry

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "emulated_cluster"
sys.path.insert(0, str(FOLDER))

from nfs_client import connection as connections  # noqa: E402
from nfs_client import filesystem as filesystems  # noqa: E402
from nfs_client.filesystem import NfsFileSystem  # noqa: E402
from nfs_client.messages import Operation, Piece  # noqa: E402

from real.data.storages import (  # noqa: E402
    DataStorage,
    open_storage,
    read_sample,
    read_storage_index,
)
from simdist.errors import RunError, ScenarioError  # noqa: E402

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True, scope="module")
def nfs_urls() -> Iterator[None]:
    """Let fsspec know `nfs://` in these tests only."""
    filesystems.register()
    yield
    _registry.pop("nfs")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nfs://host", "write nfs://HOST/EXPORT/path"),
        ("nfs://host/set?version=3", "version=3: only 4"),
        ("nfs://host/set?nfsport=x", "nfsport=x: a port is a number"),
        ("nfs://host/set?nfsport=70000", "nfsport=70000: a port is a number"),
        ("nfs://host/set?uid=0", "uid is no option here"),
    ],
)
def test_wrong_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        open_storage(url)


def test_missing_libnfs_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SONAME", "libnosuch.so.1")
    with pytest.raises(RunError, match="apt-get install libnfs13"):
        open_storage("nfs://host/set")


def test_operation_of_nfs_is_as_large_as_in_libnfs() -> None:
    assert ctypes.sizeof(Operation) == 136  # sizeof(nfs_argop4): requests are arrays of them


# A real NFS server.

SETTINGS = """
NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = {port}; Bind_addr = 127.0.0.1; Enable_NLM = false; Enable_RQUOTA = false;
                  Enable_UDP = false; }}
NFSV4 {{ Graceless = true; RecoveryBackend = fs; RecoveryRoot = "/run/ganesha"; }}
EXPORT {{ Export_Id = 1; Path = "{folder}"; Pseudo = "/set"; FSAL {{ Name = VFS; }} Protocols = 4; Transports = TCP;
          SecType = sys; Squash = No_Root_Squash; Access_Type = RO; Attr_Expiration_Time = 0; }}
"""
# A /run of its own: another server, or a message bus, may have taken names there.
START = 'mount -t tmpfs run /run && mkdir /run/ganesha && printf %s "$1" >/run/ganesha/settings && exec ganesha.nfsd '
START += "-F -f /run/ganesha/settings -p /run/ganesha/pid -L STDOUT -N NIV_WARN"

TO_END_WITH_US = ["setpriv", "--pdeathsig", "KILL"]  # however the tests end


def missing_server() -> str | None:
    try:
        connections.load_library()
    except RunError as error:
        return str(error)
    if shutil.which("ganesha.nfsd") is None:
        return "ganesha.nfsd is not here: apt-get install nfs-ganesha nfs-ganesha-vfs"
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return "needs root, and mount namespaces"
    if shutil.which("setpriv") is None:
        return "setpriv is not here: apt-get install util-linux"
    return None


REASON = missing_server()
needs_server = pytest.mark.skipif(REASON is not None, reason=f"no NFS server here: {REASON}")


class Server:
    """A file server on this machine; `stop` and `start` make an outage."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.folder, self.log = folder, log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nfs://127.0.0.1/set?version=4&nfsport={self.port}"

    def start(self) -> None:
        settings = SETTINGS.format(port=self.port, folder=self.folder)
        with self.log.open("ab") as log:
            command = [*TO_END_WITH_US, "unshare", "--mount", "sh", "-c", START, "nfs", settings]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Stand still for a while, connections and all."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # until all its threads stand
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "deep").mkdir()
    (folder / "deep" / "large").write_bytes(content_of(0, 2_500_000))
    (folder / "link").symlink_to("deep")
    for sample in range(40):
        (folder / f"{sample}.jpg").write_bytes(content_of(sample))
    write_index(index_of(40), folder / "index.csv")
    server = Server(folder, tmp_path_factory.mktemp("log") / "log")
    try:
        server.start()
        with opened(server) as storage:
            storage.read("index.csv")  # waits until it answers
        yield server
    finally:
        server.stop()


@contextmanager
def opened(
    server: Server, timeout_s: float = TIMEOUT_S, request_s: float = filesystems.REQUEST_S
) -> Iterator[DataStorage]:
    filesystem, root = url_to_fs(server.url, request_s=request_s)
    try:
        yield DataStorage(server.url, filesystem, root, timeout_s=timeout_s)
    finally:
        filesystem.close()


@needs_server
def test_nfs_server_gives_every_file_to_many_threads(running: Server) -> None:
    with opened(running) as storage, ThreadPoolExecutor(6) as threads:
        index = read_storage_index(storage)
        read = list(threads.map(lambda sample: read_sample(storage, index[sample]), list(range(40)) * 5))
        assert read == [content_of(sample) for sample in range(40)] * 5
        assert storage.read("deep/large") == content_of(0, 2_500_000)


@needs_server
def test_nfs_file_system_lists_and_describes_files(running: Server) -> None:
    filesystem, root = url_to_fs(running.url)
    assert root == "/set"
    assert filesystem.info("/set/deep/large") == {"name": "/set/deep/large", "size": 2_500_000, "type": "file"}
    assert filesystem.ls("/set/deep", detail=False) == ["/set/deep/large"]
    assert len(filesystem.find("/set")) == 43
    assert {each["type"] for each in filesystem.ls("/set")} == {"file", "directory", "link"}
    with filesystem.open("/set/3.jpg") as file:
        assert file.read() == content_of(3)
    assert filesystem.cat_file("/set/3.jpg", 10, 20) == content_of(3)[10:20]
    assert filesystem.exists("/set/3.jpg")
    assert not filesystem.exists("/set/none")
    filesystem.close()


@needs_server
@pytest.mark.parametrize(
    ("name", "error"),
    [("none.jpg", "FileNotFoundError"), ("deep", "IsADirectoryError"), ("1.jpg/2.jpg", "NotADirectoryError")],
)
def test_file_that_nfs_does_not_have_is_an_error_at_once(running: Server, name: str, error: str) -> None:
    with opened(running) as storage:
        with pytest.raises(RunError, match=rf"nfs://.*: {name}: {error}"):
            storage.read(name)
        assert storage.read("1.jpg") == content_of(1)


class CountingLibrary:
    """libnfs, and how many requests were sent by it."""

    def __init__(self, library: object) -> None:
        self._library = library
        self.n_requests = 0

    def __getattr__(self, name: str) -> object:
        self.n_requests += name == "rpc_nfs4_compound_async"
        return getattr(self._library, name)


@needs_server
def test_file_on_nfs_takes_one_round_trip(running: Server) -> None:
    filesystem = NfsFileSystem("127.0.0.1", port=running.port)
    library = filesystem._library = CountingLibrary(filesystem._library)
    filesystem.cat_file("/set/1.jpg")
    assert library.n_requests == 1
    filesystem.cat_file("/set/deep/large")
    assert library.n_requests == 1 + 3  # a MiB each
    assert len(filesystem._idle) == 1
    filesystem.close()


class Clock:
    """A clock that moves when a request is sent, and by nothing else; it takes the place of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which requests to an NFS server are given up."""
    clock = Clock()
    monkeypatch.setattr(connections, "time", clock)
    monkeypatch.setattr(filesystems, "time", clock)
    return clock


class SlowLibrary:
    """libnfs, on a network where each answer takes a while."""

    def __init__(self, library: object, clock: Clock, answer_s: float) -> None:
        self._library, self._clock, self._answer_s = library, clock, answer_s

    def __getattr__(self, name: str) -> object:
        if name == "rpc_nfs4_compound_async":
            self._clock.now_s += self._answer_s
        return getattr(self._library, name)


@needs_server
def test_file_whose_parts_come_in_time_may_take_longer_than_a_request(running: Server, clock: Clock) -> None:
    with closing(NfsFileSystem("127.0.0.1", port=running.port)) as filesystem:
        filesystem._library = SlowLibrary(filesystem._library, clock, 0.9 * filesystems.REQUEST_S)
        assert filesystem.cat_file("/set/deep/large") == content_of(0, 2_500_000)
    assert clock.now_s == pytest.approx(100 + 2.7 * filesystems.REQUEST_S)


class NoLibrary:
    """In place of libnfs: all goes well, nothing happens."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: int(name == "rpc_init_context")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[bytes]:
    """The parts that a server has given of a file with 30; each takes nine tenths of the longest time for a request."""
    given: list[bytes] = []

    def wait(connection: connections.Connection, deadline_s: float) -> None:
        if connection.broken:  # it connects
            return
        clock.now_s += 0.9 * filesystems.REQUEST_S
        if clock.now_s > deadline_s:
            raise TimeoutError(errno.ETIMEDOUT, "host:1 does not answer")
        given.append(b"part")
        connection._reply = Piece(given[-1], len(given) == 30)

    monkeypatch.setattr(filesystems, "load_library", NoLibrary)
    monkeypatch.setattr(connections.Connection, "_wait", wait)
    return given


def test_server_that_goes_on_answering_is_waited_for(parts: list[bytes], clock: Clock) -> None:
    with closing(NfsFileSystem("host")) as filesystem:
        assert filesystem.cat_file("/set/large") == b"part" * 30
    assert clock.now_s == pytest.approx(100 + 27 * filesystems.REQUEST_S)


def test_whole_file_has_a_limit_and_who_gives_up_says_how_far_it_came(parts: list[bytes]) -> None:
    filesystem = NfsFileSystem("host")
    with pytest.raises(TimeoutError, match=r"host:1 does not answer in time any more, after 12 bytes"):
        filesystem.cat_file("/set/large", timeout_s=2.8 * filesystems.REQUEST_S)
    assert len(parts) == 3
    filesystem.close()


@needs_server
def test_file_that_changed_on_nfs_is_an_error(running: Server) -> None:
    with opened(running) as storage:
        index = read_storage_index(storage)
        assert read_sample(storage, index[39]) == content_of(39)
        (running.folder / "39.jpg").write_bytes(content_of(1))
        with pytest.raises(RunError, match=r"39\.jpg: has changed on the storage"):
            read_sample(storage, index[39])
    (running.folder / "39.jpg").write_bytes(content_of(39))


@needs_server
def test_reading_goes_on_when_the_nfs_server_comes_back(running: Server) -> None:
    with opened(running) as storage, ThreadPoolExecutor(4) as threads:
        assert list(threads.map(storage.read, ["1.jpg"] * 8)) == [content_of(1)] * 8  # connections to lose
        running.stop()
        reads = [threads.submit(storage.read, f"{sample}.jpg") for sample in range(8)]
        time.sleep(0.5)  # in which the reads fail, and are tried again
        running.start()
        assert [each.result(TIMEOUT_S) for each in reads] == [content_of(sample) for sample in range(8)]


@needs_server
def test_nfs_server_that_falls_silent_ends_in_an_error_that_names_it(running: Server) -> None:
    with opened(running, timeout_s=0.8, request_s=0.2) as storage:
        storage.read("1.jpg")
        message = rf"2\.jpg: cannot be read; tried .* of 0\.8 s.*{running.port} does not answer"
        with running.silenced(), pytest.raises(RunError, match=message):
            storage.read("2.jpg")
        assert storage.read("2.jpg") == content_of(2)


@needs_server
def test_forked_child_does_not_use_the_connections_of_its_parent(running: Server) -> None:
    filesystem = NfsFileSystem("127.0.0.1", port=running.port)
    filesystem.cat_file("/set/1.jpg")
    (connection,) = filesystem._idle
    filesystem._pid = -1  # what a child finds
    assert filesystem.cat_file("/set/2.jpg") == content_of(2)
    assert connection not in filesystem._idle
    connection.close()
    filesystem.close()


needs_libnfs = pytest.mark.skipif(REASON is not None and "libnfs" in REASON, reason=REASON or "")


@needs_libnfs
def test_nobody_at_an_nfs_port_is_an_error_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    storage = open_storage(f"nfs://127.0.0.1/set?nfsport={port}", timeout_s=0.3)
    with pytest.raises(RunError, match=rf"1\.jpg: cannot be read; tried for .* of 0\.3 s, .*127\.0\.0\.1:{port}"):
        storage.read("1.jpg")


@needs_libnfs
def test_nobody_at_an_nfs_port_is_a_refused_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    storage = open_storage(f"nfs://127.0.0.1/set?nfsport={port}", timeout_s=0.1)
    with pytest.raises(RunError, match=rf"last: 127\.0\.0\.1:{port}: connection refused$"):
        storage.read("1.jpg")


@needs_libnfs
def test_a_server_that_takes_no_connection_is_given_up_before_one_that_takes_long_to_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadlines_s = []

    def refuse(*_server: object, deadline_s: float, **_settings: object) -> None:
        deadlines_s.append(deadline_s)
        raise ConnectionRefusedError

    monkeypatch.setattr(filesystems, "Connection", refuse)
    monkeypatch.setattr(filesystems.time, "monotonic", lambda: 100.0)
    for timeout_s in (10.0, 2.0):
        with pytest.raises(ConnectionRefusedError):
            NfsFileSystem("host").cat_file("/set/1.jpg", timeout_s=timeout_s)
    assert deadlines_s == [105.0, 102.0]
