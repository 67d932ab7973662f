"""Files of a data set: their index, storages, and a node's copies. Whatever fails, no wrong byte."""

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
import pytest
from data_files import SampleSet, content_of, entry, generate, index_of, read_index, write_index

from real.data import filecache
from real.data.filecache import FileCache
from real.data.indexing import index_folder
from real.data.indexing import main as index_command
from real.data.sample_index import make_index, write_entries
from real.data.storages import DataStorage, open_storage, read_sample, read_storage_index
from simdist.errors import RunError, ScenarioError
from simdist.plan.index import Entry, parse_entries

TIMEOUT_S = 60.0


def refuse() -> bytes:
    raise AssertionError("is not to be read")


# The index.


def test_index_that_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    lines = [Entry("b, with comma/1.jpg", 3, 1, 2**32 - 1), Entry('a/"quoted" é.png', -1, 2**40, 0)]
    write_index(make_index(lines), tmp_path / "index.csv")
    index = read_index(tmp_path / "index.csv")
    assert [index[sample] for sample in range(len(index))] == lines
    assert (index.labels.dtype, index.nbytes.dtype, index.crc32.dtype) == (np.int64, np.int64, np.uint32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,label\n", "set:1: 'name,label': the header is name,label,nbytes,crc32"),
        ("", "set:1: '': the header"),
        ("name,label,nbytes,crc32\na,0,1,2\na,0,1\n", r"set:3: 3 columns \('a,0,1'\)"),
        ("name,label,nbytes,crc32\na,x,1,2\n", "set:2: label 'x': write a whole number"),
        ("name,label,nbytes,crc32\na,0,0,2\n", "set:2: nbytes '0': write a whole number from 1"),
        ("name,label,nbytes,crc32\na,0,1.5,2\n", "set:2: nbytes '1.5'"),
        ("name,label,nbytes,crc32\na,0,1,4294967296\n", "set:2: crc32 '4294967296': .* to 4294967295"),
        ("name,label,nbytes,crc32\n../a,0,1,2\n", r"set:2: name '../a' leaves the folder"),
        ("name,label,nbytes,crc32\n/etc/passwd,0,1,2\n", "set:2: name '/etc/passwd' leaves the folder"),
        ("name,label,nbytes,crc32\na//b,0,1,2\n", "set:2: name 'a//b' is no path of a file"),
        ("name,label,nbytes,crc32\n,0,1,2\n", "set:2: name '' is no path of a file"),
        ("name,label,nbytes,crc32\na,0,1,23", "set:2: ends without a line break: the file is truncated"),
        (
            "name,label,nbytes,crc32\na,0,1,2\nb,0,1,2\na,1,1,3\n",
            "set:4: name 'a' is in line 2 too; write each file once",
        ),
        ('name,label,nbytes,crc32\n"a,0,1,2\n', "set:2: unexpected end of data"),
    ],
)
def test_wrong_line_of_an_index_is_named(text: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        make_index(parse_entries(text.encode(), where="set"))


def test_index_that_is_not_text_is_refused() -> None:
    with pytest.raises(ScenarioError, match="set: byte 3 is not UTF-8"):
        make_index(parse_entries(b"nam\xff", where="set"))


def test_interrupted_index_leaves_the_old_one(tmp_path: Path) -> None:
    def interrupted() -> Iterator[Entry]:
        yield Entry("a", 0, 1, 2)
        raise KeyboardInterrupt

    write_index(index_of(3), tmp_path / "index.csv")
    with pytest.raises(KeyboardInterrupt):
        write_entries(interrupted(), tmp_path / "index.csv")
    assert len(read_index(tmp_path / "index.csv")) == 3
    assert os.listdir(tmp_path) == ["index.csv"]


def test_folder_of_images_is_indexed_by_class_and_name(tmp_path: Path) -> None:
    files = {"dog/2.JPEG": b"two", "dog/1.png": b"one", "cat/deep/3.jpg": b"three", "cat/notes.txt": b"none"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert list(index_folder(tmp_path)) == [
        entry("cat/deep/3.jpg", b"three", 0),
        entry("dog/1.png", b"one", 1),
        entry("dog/2.JPEG", b"two", 1),
    ]


def test_class_without_images_and_empty_image_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="has no sub-folders"):
        list(index_folder(tmp_path))
    (tmp_path / "cat").mkdir()
    with pytest.raises(ScenarioError, match="cat: has no image"):
        list(index_folder(tmp_path))
    (tmp_path / "cat" / "1.jpg").touch()
    with pytest.raises(ScenarioError, match=r"1\.jpg: is empty"):
        list(index_folder(tmp_path))


def test_index_command_writes_the_index_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(tmp_path, SampleSet(n_samples=4, nbytes=5000, n_classes=2))
    assert index_command([str(tmp_path)]) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert index_command([str(tmp_path), "--force"]) == 0
    assert sorted(read_index(tmp_path / "index.csv").labels) == [0, 0, 1, 1]


# Storages.


class FakeStorage(DataStorage):
    """Gives what it is told to, one answer per try; an exception is raised. Its clock moves by its pauses only."""

    def __init__(self, answers: Sequence[bytes | Exception], timeout_s: float = 60.0) -> None:
        self.clock_s = 100.0
        self.pauses_s: list[float] = []
        super().__init__("fake://set", self, "", timeout_s=timeout_s, now=lambda: self.clock_s, sleep=self._pass)
        self._answers = list(answers)

    def cat_file(self, path: str) -> bytes:
        match self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]:
            case bytes(content):
                return content
            case error:
                raise error

    def _pass(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.clock_s += pause_s


def test_outage_is_survived_with_ever_longer_pauses() -> None:
    outage = [ConnectionError(errno.ECONNREFUSED, "refused")] * 6 + [TimeoutError(errno.ETIMEDOUT, "silence")]
    storage = FakeStorage([*outage, b"here"])
    assert storage.read("1.jpg") == b"here"
    assert storage.pauses_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]


def test_outage_beyond_the_timeout_says_what_was_tried_where_and_how_long() -> None:
    storage = FakeStorage([ConnectionError(errno.ECONNREFUSED, "Connection refused")], timeout_s=10)
    said = r"fake://set: a/1.jpg: cannot be read; tried for 9\.15 s of 10 s, .*: Connection refused"
    with pytest.warns(RuntimeWarning, match="trying until 10 s are over"), pytest.raises(RunError, match=said):
        storage.read("a/1.jpg")
    assert sum(storage.pauses_s) <= 10


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        FileNotFoundError("bucket/1.jpg"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.ELOOP, "a link"),
        ValueError("a mistake"),
    ],
)
def test_what_is_no_outage_is_an_error_at_once(error: Exception) -> None:
    storage = FakeStorage([error])
    with pytest.raises(RunError, match=rf"fake://set: 1.jpg: {type(error).__name__}"):
        storage.read("1.jpg")
    assert storage.pauses_s == []


def test_library_errors_of_object_stores_are_tried_again() -> None:
    assert FakeStorage([Exception("endpoint unreachable"), b"here"]).read("1.jpg") == b"here"


@pytest.mark.parametrize("name", ["../1.jpg", "/etc/passwd", "a/../../b", ""])
def test_no_name_leads_out_of_a_storage(name: str) -> None:
    with pytest.raises(ScenarioError, match="fake://set: name"):
        FakeStorage([b"secret"]).read(name)


def test_short_read_is_tried_once_more() -> None:
    assert read_sample(FakeStorage([b"hal", b"whole"]), entry("1.jpg", b"whole")) == b"whole"


@pytest.mark.parametrize(
    ("content", "message"), [(b"half", "4 bytes, the index says 5"), (b"other", r"\(other bytes, read twice\)")]
)
def test_file_that_changed_on_the_storage_is_an_error(content: bytes, message: str) -> None:
    with pytest.raises(RunError, match=rf"fake://set: 1.jpg: has changed on the storage since .*{message}"):
        read_sample(FakeStorage([content]), entry("1.jpg", b"whole"))


def test_folders_and_memory_are_storages(tmp_path: Path) -> None:
    generate(tmp_path, SampleSet(n_samples=2, nbytes=5000))
    memory = fsspec.filesystem("memory")
    for path in tmp_path.rglob("*.*"):
        memory.pipe_file(f"/test_data_files/{path.relative_to(tmp_path)}", path.read_bytes())
    try:
        for url in (str(tmp_path), f"file://{tmp_path}", "memory://test_data_files"):
            storage = open_storage(url)
            index = read_storage_index(storage)
            assert [len(read_sample(storage, index[sample])) for sample in range(2)] == list(index.nbytes)
            with pytest.raises(RunError, match=rf"{url}: none.jpg: FileNotFoundError"):
                storage.read("none.jpg")
    finally:
        memory.rm("/test_data_files", recursive=True)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://set", "nosuch://set: Protocol not known"),
        ("nfs://host/set", r"nfs://host/set: Protocol not known.*mount it and write the folder"),
    ],
)
def test_wrong_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        open_storage(url)


# A node's copies.


def fetch(cache: FileCache, samples: Sequence[int], nbytes: int = 1000) -> None:
    """Fetch files, and look at what comes."""
    for sample in samples:
        content = content_of(sample, nbytes)
        assert cache.fetch(sample, lambda content=content: content, keep=True) == content


def cached(folder: Path) -> list[Path]:
    """Return the files that a cache shows."""
    return sorted(path for path in folder.glob("[0-9a-f][0-9a-f]/*"))


def test_file_is_fetched_once_and_found_by_the_next_run(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, index_of(3))
    assert cache.get(1) is None
    assert cache.fetch(1, lambda: content_of(1), keep=True) == content_of(1)
    assert cache.fetch(1, refuse, keep=True) == content_of(1)
    assert len(cached(tmp_path)) == 1
    cache = FileCache(tmp_path, index_of(3))
    assert cache.get(1) == content_of(1)


def test_file_that_is_not_to_be_kept_is_handed_on_only(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, index_of(3))
    assert cache.fetch(1, lambda: content_of(1), keep=False) == content_of(1)
    assert cache.get(1) is None


@pytest.mark.parametrize("damage", [b"", content_of(0)[:-1], b"x" + content_of(0)[1:], content_of(0) + b"x"])
def test_damaged_copy_is_removed_counted_and_fetched_again(tmp_path: Path, damage: bytes) -> None:
    cache = FileCache(tmp_path, index_of(1))
    cache.fetch(0, lambda: content_of(0), keep=True)
    cached(tmp_path)[0].write_bytes(damage)
    assert cache.get(0) is None
    assert cached(tmp_path) == []
    assert cache.fetch(0, lambda: content_of(0), keep=True) == content_of(0)
    assert cache.get(0) == content_of(0)


@pytest.mark.parametrize(("number", "stays"), [(errno.EIO, False), (errno.EMFILE, True)])
def test_copy_that_cannot_be_read_is_removed_only_if_the_disk_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, stays: bool
) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    cache = FileCache(tmp_path, index_of(1))
    fetch(cache, [0])
    monkeypatch.setattr(filecache, "_content", fail)
    if stays:
        with pytest.raises(RunError, match="cannot be read: Too many open files"):
            cache.get(0)
    else:
        assert cache.get(0) is None
    assert bool(cached(tmp_path)) == stays


def test_copy_of_another_data_set_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    other = make_index([entry("0.jpg", content_of(7))])
    mine, others = (FileCache(tmp_path, each) for each in (index_of(1), other))
    mine.fetch(0, lambda: content_of(0), keep=True)
    assert others.get(0) is None
    others.fetch(0, lambda: content_of(7), keep=True)
    assert (mine.get(0), others.get(0)) == (content_of(0), content_of(7))
    assert len(cached(tmp_path)) == 2


def test_failed_fetch_is_passed_on_and_the_next_one_tries_for_itself(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise RunError("storage is gone")

    cache = FileCache(tmp_path, index_of(1))
    with pytest.raises(RunError, match="storage is gone"):
        cache.fetch(0, fail, keep=True)
    assert cache.fetch(0, lambda: content_of(0), keep=True) == content_of(0)


def test_full_disk_hands_files_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: memoryview) -> None:
        os.write(descriptor, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(filecache, "_write_all", full)
    cache = FileCache(tmp_path, index_of(2))
    with pytest.warns(RuntimeWarning, match="the disk is full") as warned:
        fetch(cache, range(2))
    assert len(warned) == 1
    assert cached(tmp_path) == list((tmp_path / "parts").iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tiny", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_really_full_disk_keeps_whole_files_only(tiny_disk: Path) -> None:
    index = index_of(10, 30_000)
    cache = FileCache(tiny_disk, index)
    with pytest.warns(RuntimeWarning, match="the disk is full"):
        fetch(cache, range(10), 30_000)
    assert 0 < len(cached(tiny_disk)) < 10
    assert {path.stat().st_size for path in cached(tiny_disk)} == {30_000}
    assert sum(cache.get(sample) is not None for sample in range(10)) == len(cached(tiny_disk))


PRELUDE = """
import os, sys, time
from pathlib import Path
from real.data import filecache
from real.data.filecache import FileCache
from data_files import content_of, index_of
folder = Path(sys.argv[1])
"""
HALF_WRITTEN = """
def half(descriptor, content):
    os.write(descriptor, content[:500])
    print("half", flush=True)
    time.sleep(1000)
filecache._write_all = half
cache = FileCache(folder, index_of(4))
cache.fetch(1, lambda: content_of(1), keep=True)
"""


@contextmanager
def child(script: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """Run a script in a process of its own, which ends with the block."""
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2]), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_killed_writer_leaves_no_file(tmp_path: Path) -> None:
    with child(HALF_WRITTEN, tmp_path) as process:
        assert line_of(process) == "half"
        cache = FileCache(tmp_path, index_of(4))
        assert len(list((tmp_path / "parts").iterdir())) == 1  # its writer lives
        assert cache.get(1) is None
        process.kill()
        process.wait()
        assert cache.get(1) is None
        assert cache.fetch(1, lambda: content_of(1), keep=True) == content_of(1)
    cache = FileCache(tmp_path, index_of(4))
    assert list((tmp_path / "parts").iterdir()) == []
    assert cache.get(1) == content_of(1)


def test_links_in_a_cache_are_not_followed(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", index_of(1))
    fetch(cache, [0])
    (kept,) = (tmp_path / "cache" / "00").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    elsewhere = kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(elsewhere)
    assert cache.get(0) is None
    assert not kept.is_symlink()
    assert elsewhere.read_bytes() == content_of(0)


def test_folder_that_cannot_hold_a_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file.*: no cache can be here: "):
        FileCache(tmp_path / "file", index_of(1))
