"""Files from outside: what may harm is refused at once, by every reader, with little memory."""

import errno
import fcntl
import gzip
import os
import socket
import subprocess
import zlib
from contextlib import nullcontext

import pytest
from commandline import call, edited, process, write
from messages import assert_message

from simdist.errors import RunError
from simdist.files import (
    MAX_DOCUMENT_NBYTES,
    MAX_LINE_NBYTES,
    RefusedError,
    lines_of,
    locked,
    open_regular,
    open_unpacked,
    read_content,
)
from simdist.runs import run_directory

GIB = 1 << 30
RECORDED = "{kind: recorded, file: %s}"
DELAYS = "{kind: transient, probability: 10%, delay: 50 ms}"

# Prints the largest resident set, in MiB, that a command line had.
PEAK = """
import sys
from pathlib import Path
from simdist.cli import main
code = main(sys.argv[1:])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print("peak", int(status["VmHWM"].split()[0]) >> 10)  # not ru_maxrss: that is at least what the parent had at the fork
sys.exit(code)
"""


def sparse(path, nbytes, start=b""):
    """Write a file of one line that takes no room on the disk."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(nbytes)
    return path


def special(kind, path):
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
    return path


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
@pytest.mark.parametrize("read", [open_regular, read_content])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, monkeypatch, kind, read):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    with pytest.raises(RefusedError, match=f"it is a {kind}: give a regular file"):
        read(special(kind, tmp_path.__class__("x")))


def test_folder_is_refused_as_the_operating_system_does(tmp_path):
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


def test_file_that_was_exchanged_after_the_first_look_is_refused(tmp_path, monkeypatch):
    regular, pipe = write(tmp_path / "x", ""), special("pipe", tmp_path / "pipe")
    found = os.stat(regular)
    monkeypatch.setattr(os, "stat", lambda path: found)
    with pytest.raises(RefusedError, match="it is a pipe"):
        open_regular(pipe)


def test_content_up_to_the_limits_is_returned(tmp_path):
    for content in (b"", b"one\ntwo", b"x" * 10, b"\n" + b"x" * 9):
        (tmp_path / "x").write_bytes(content)
        assert read_content(tmp_path / "x", most_nbytes=10, line_nbytes=10) == content
    (tmp_path / "x").write_bytes(bytes(11))
    with pytest.raises(RefusedError, match="it has 11 bytes or more; write at most 10"):
        read_content(tmp_path / "x", most_nbytes=10)


def test_file_that_has_more_than_it_says_is_refused(tmp_path):
    with pytest.raises(RefusedError, match="bytes or more; write at most 10"):
        read_content("/proc/self/status", most_nbytes=10)  # whose size is 0


def test_line_across_parts_is_refused_by_its_number(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"a\nb\n" + bytes(MAX_LINE_NBYTES) + b"\n")
    assert len(read_content(path)) == MAX_LINE_NBYTES + 5
    path.write_bytes(b"a\nb\n" + bytes(MAX_LINE_NBYTES + 1) + b"\n")
    with pytest.raises(RefusedError, match="line 3 has more than 33,554,432 bytes"):
        read_content(path)
    assert len(read_content(path, line_nbytes=None)) == MAX_LINE_NBYTES + 6
    with path.open("rb") as file, pytest.raises(RefusedError, match="line 3 has more than"):
        list(lines_of(file))


def test_folder_is_locked_until_the_end_and_no_link_is_followed(tmp_path):
    folder, aim = tmp_path / "new", tmp_path / "aim"
    with locked(folder):
        assert (folder / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    assert not list(folder.iterdir())
    (folder / ".lock").symlink_to(aim)
    with pytest.raises(RunError, match=r"\.lock: cannot be written: Too many levels of symbolic links"), locked(folder):
        pass
    assert not aim.exists()


@pytest.mark.parametrize(("number", "works"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_folder_of_a_file_system_without_locks_is_not_locked(tmp_path, monkeypatch, number, works):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with nullcontext() if works else pytest.raises(RunError, match="Input/output error"), locked(tmp_path):
        assert works


def test_packed_file_is_unpacked_by_its_first_bytes(tmp_path):
    (tmp_path / "plain").write_bytes(b"some text")
    (tmp_path / "packed").write_bytes(gzip.compress(b"some text"))
    for name in ("plain", "packed"):
        with open_unpacked(tmp_path / name) as file:
            assert file.read() == b"some text"


def readers(folder, bad, run):
    """Return a command line for every kind of file that is read as a whole, or line by line."""
    recording = (folder / "recorded.csv").absolute()
    recording.unlink(missing_ok=True)
    recording.symlink_to(bad)
    replays = write(folder / "replays.yaml", edited((DELAYS, RECORDED % recording)))
    found = {
        "scenario": ("compare", bad),
        "sweep": ("sweep", bad, "-o", folder / "out"),
        "recording": ("compare", replays),
        "cluster": ("validate", run, "--cluster", bad),
        "profile": ("import", bad, "-o", folder / "job.yaml"),
        "trace": ("trace", bad, "--chrome", folder / "chrome.json"),
    }
    for kind, name, command in [
        ("plan", run_directory.PLAN, ("validate",)),
        ("design", "design.jsonl", ("results",)),
    ]:
        (folder / kind).mkdir(exist_ok=True)
        if kind == "plan":
            for other in (run_directory.SCENARIO, run_directory.DELAYS):
                (folder / kind / other).write_bytes((run / other).read_bytes())
        (folder / kind / name).unlink(missing_ok=True)
        (folder / kind / name).symlink_to(bad)
        found[kind] = (*command, folder / kind)
    return found


@pytest.fixture
def run(tmp_path, capsys):
    assert call(capsys, "plan", write(tmp_path / "run.yaml"), "-o", tmp_path / "runs").code == 0
    return tmp_path / "runs" / "sync"


@pytest.mark.parametrize("kind", ["pipe", "device", "one line"])
def test_every_reader_refuses_it_with_one_error(tmp_path, capsys, run, kind):
    bad = tmp_path / "bad"
    (sparse(bad, GIB) if kind == "one line" else special(kind, bad))
    for name, command in readers(tmp_path, bad, run).items():
        answer = call(capsys, *command)
        assert answer.code in (1, 2), name
        assert answer.err.count("error:") == 1, (name, answer.err)
        assert_message(f"from outside: {kind} as {name}", answer.err, tmp_path)


def zeros(nbytes):
    """Return zlib's stream of zeros without having them: one block, many times."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    block = packer.compress(bytes(1 << 22)) + packer.flush(zlib.Z_FULL_FLUSH)
    more = packer.compress(bytes(1 << 22)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block + more * (nbytes // (1 << 22) - 1)


@pytest.mark.parametrize("kind", ["one line", "profile in one event", "white space"])
def test_little_memory_is_taken_for_a_bomb(tmp_path, kind):
    bad = tmp_path / "bad.json"
    match kind:
        case "one line":
            sparse(bad, MAX_DOCUMENT_NBYTES, b"x: ")
            command = ("compare", bad)
        case "profile in one event":
            bad.write_bytes(gzip.compress(b'{"traceEvents": [{"ph": "') + zeros(GIB))
            command = ("import", bad, "-o", tmp_path / "job.yaml")
        case "white space":
            bad.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (80 << 20)))
            command = ("import", bad, "-o", tmp_path / "job.yaml")
    argv, environment = process(*command, code=PEAK)
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("error:") == 1
    assert "takes more than" in ended.stderr or "has more than" in ended.stderr
    assert int(ended.stdout.split()[-1]) < 500
