"""A file server for the emulated cluster: real NFS (version 4), behind a link with a rate of its own.

    with network.cluster(4, rate_bps=400e6, servers_bps=[1e9]) as (*nodes, machine):
        with nfs.serve(folder, machine) as server:
            nodes[0].run(["nfs-cp", server.url("images/cat.jpg"), "cat.jpg"])
            server.stop()  # an outage: readers are cut off, and new ones refused
            server.start()

The server is nfs-ganesha, a process like any other, and libnfs reads from it: neither takes NFS in the kernel, nor
rpcbind, and in a network namespace every port is free. Features that make it fit here:

* Nothing of it stays. Its settings and its state are in a file system in memory that only its process sees, its log
  has no name, and the process ends with its machine: see `network.clean` for owners that were killed.
* Files come from this machine's memory once they were read, so the link is what limits it. It does not wait for ranks
  that decode, as it would not on a machine of its own.
* By default it believes for 60 s what it knows of a file. Here it looks every time: a file that was changed in the
  folder is read as it is.
* It is read-only, and has no grace period: it answers 0.1 s after its start, as it has no locks to wait for.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import network

from simdist.errors import RunError

_PORT = 2049  # that of NFS, which clients take where a URL names none
_EXPORT = "export"
_TIMEOUT_S = 60.0
_POLL_S = 0.05
_TAIL_LINES = 20
_LIBRARIES = ("lib/*/ganesha/libfsalvfs.so", "lib*/ganesha/libfsalvfs.so")

# Settings go through an argument, as a file would stay when the server is killed. On the other /run, a system may have
# a message bus, where a second server would find its name taken.
_START = """
set -e
mount -t tmpfs ganesha /run
mkdir /run/ganesha
printf %s "$1" > /run/ganesha/settings
exec ganesha.nfsd -F -f /run/ganesha/settings -p /run/ganesha/pid -L STDOUT -N NIV_WARN
"""
_SETTINGS = """
NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = {port}; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }}
NFSV4 {{ Graceless = true; RecoveryBackend = fs; RecoveryRoot = "/run/ganesha"; }}
EXPORT {{
    Export_Id = 1; Path = "{folder}"; Pseudo = "/{export}"; FSAL {{ Name = VFS; }}
    Protocols = 4; Transports = TCP; SecType = sys; Squash = No_Root_Squash; Access_Type = RO;
    Attr_Expiration_Time = 0;
}}
"""


class Server:
    """Serves a folder; made by `serve`.

    Args:
        folder: The folder that it serves.
        machine: Where it runs.
        log: File for what it reports.
    """

    def __init__(self, folder: Path, machine: network.Node, log: IO[bytes]) -> None:
        self.folder = folder
        self.machine = machine
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, path: str = "") -> str:
        """Return where libnfs finds the folder, or a file in it."""
        return f"{self._root()}{_EXPORT}{'/' if path else ''}{path}{self._options()}"

    def start(self) -> None:
        """Start it, and wait until it answers; do nothing if it runs.

        Raises:
            RunError: shows the end of its log.
        """
        if self._process is not None:
            return
        settings = _SETTINGS.format(port=_PORT, folder=self.folder, export=_EXPORT)
        command = network.realtime(["sh", "-c", _START, "nfs", settings])
        self._process = self.machine.run(command, output=self._log)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while (exports := self._exports()) is None:
            if self._process.poll() is not None:
                raise self._error(f"ended with exit status {self._process.returncode}")
            if time.monotonic() > deadline_s:
                raise self._error(f"has not answered within {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        if _EXPORT not in exports:
            raise self._error("cannot serve this folder; its file system must give handles of files, as ext4 and tmpfs")

    def stop(self) -> None:
        """End it as a crash would; do nothing if it does not run."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def _root(self) -> str:
        return f"nfs://{self.machine.address}/"

    def _options(self) -> str:
        return f"?version=4&nfsport={_PORT}"

    def _exports(self) -> list[str] | None:
        """Return the names of what it serves, or None if it does not answer; a folder of many files takes no longer."""
        with tempfile.TemporaryFile() as listed:
            command = ["nfs-ls", f"{self._root()}{self._options()}"]
            asking = self.machine.run(command, output=listed)
            try:
                code = asking.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return None
            finally:
                asking.kill()
                asking.wait()
            listed.seek(0)
            return [line.split()[-1] for line in listed.read().decode().splitlines()] if code == 0 else None

    def _error(self, what: str) -> RunError:
        self.stop()  # it writes where we read
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return RunError("\n".join([f"the NFS server of {self.folder} {what}; it printed:", *tail]))


@contextmanager
def serve(folder: Path, machine: network.Node) -> Iterator[Server]:
    """Serve a folder over NFS from a machine of the emulated cluster; the server ends with the block at the latest.

    Args:
        folder: On a file system that gives handles of files: ext4, xfs and tmpfs do, layers of containers do not.
        machine: Best one of its own, as the server shares its link with whatever else runs there.

    Raises:
        RunError: the server does not start; shows the end of its log.
    """
    path = folder.resolve()
    if not path.is_dir() or not set('"\\\n').isdisjoint(str(path)):
        raise RunError(f"{path}: cannot be served; give a folder that exists, without quotes in its path")
    with tempfile.TemporaryFile() as log:
        server = Server(path, machine, log)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def missing() -> str | None:
    """Return why this machine cannot serve files to an emulated cluster, or None if it can."""
    if reason := network.missing():
        return reason
    lacking = [program for program in ("ganesha.nfsd", "nfs-ls") if shutil.which(program) is None]
    if not any(any(Path("/usr").glob(pattern)) for pattern in _LIBRARIES):
        lacking.append("libfsalvfs.so")
    return f"no {', '.join(lacking)} (packages nfs-ganesha, nfs-ganesha-vfs, libnfs-utils)" if lacking else None
