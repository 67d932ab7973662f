"""Arrays from outside: what is declared is compared with what is there before memory is taken."""

import io
import re
import struct
import zipfile

import numpy as np
import pytest
from commandline import call, edited, write
from messages import assert_message
from pydantic import ValidationError

from simdist.arrays import ArrayError, open_arrays, read_array
from simdist.runs import run_directory
from simdist.scenario.disturbances import Recorded

HUGE = (3 << 24, 8)  # 3 GiB


def header(shape, descr="<f8"):
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": descr, "fortran_order": False, "shape": shape})
    return text.getvalue()


def archive(path, members, compression=zipfile.ZIP_STORED):
    """Write an archive of members as they are, without numpy."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


def sizes_changed(path, nbytes):
    """Let the directory of an archive of one member say that it unpacks to so many bytes."""
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02")
    struct.pack_into("<I", content, at + 24, nbytes)
    path.write_bytes(content)
    return path


def forged(path, kind):
    size = 128 << 20
    match kind:
        case "declares more than there is":
            return archive(path, {"host": header(HUGE) + bytes(1000)})
        case "declares less than there is":
            return archive(path, {"host": header((2, 8)) + bytes(1000)})
        case "unpacks to far more":
            content = header((size // 64, 8)) + bytes(size)
            return archive(path, {"host": content}, zipfile.ZIP_DEFLATED)
        case "its size is a lie, too":
            return sizes_changed(
                archive(path, {"host": header(HUGE) + bytes(1000)}, zipfile.ZIP_DEFLATED), len(header(HUGE)) + (3 << 30)
            )
        case "compressed otherwise":
            return archive(path, {"host": header((2, 8)) + bytes(128)}, zipfile.ZIP_BZIP2)
        case "header of another version":
            return archive(path, {"host": b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31) + bytes(100)})
    raise AssertionError(kind)


KINDS = [
    "declares more than there is",
    "declares less than there is",
    "unpacks to far more",
    "its size is a lie, too",
    "compressed otherwise",
    "header of another version",
]


@pytest.mark.parametrize("kind", KINDS)
def test_forged_array_is_refused_before_it_is_read(tmp_path, monkeypatch, kind):
    path = forged(tmp_path / "x.npz", kind)
    monkeypatch.setattr(np.lib.format, "read_array", None)
    with open_arrays(path) as file, pytest.raises(ArrayError) as refusal:
        file.read("host")
    assert_message(f"forged array: {kind}", str(refusal.value))


def test_directory_of_an_archive_is_not_read_if_it_is_huge(tmp_path):
    path = archive(tmp_path / "x.npz", {"host": header((2, 8)) + bytes(128)})
    content = bytearray(path.read_bytes())
    end = content.rindex(b"PK\x05\x06")
    struct.pack_into("<I", content, end + 12, 1 << 30)
    with path.open("wb") as file:  # so large that the directory fits in it
        file.seek(2 << 30)
        file.write(content[end:])
    with pytest.raises(ArrayError, match=r"the directory of the archive has 1,073,741,824 bytes"), open_arrays(path):
        pass


def test_larger_array_than_asked_for_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", host=np.zeros((4, 2)))
    with open_arrays(tmp_path / "x.npz") as file:
        assert file.read("host", most_nbytes=64).shape == (4, 2)
        with pytest.raises(ArrayError, match=re.escape("host is float64 (4, 2): 64 bytes; write 63 or less")):
            file.read("host", most_nbytes=63)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3).T, np.zeros((0, 3)), np.zeros((1 << 20, 8))], ids=len)
def test_arrays_of_numpy_come_back(tmp_path, save, array):
    save(tmp_path / "x.npz", host=array)
    with open_arrays(tmp_path / "x.npz") as file:
        assert file.names == ("host",)
        np.testing.assert_array_equal(file.read("host"), array)


def test_single_array_is_the_expected_one_or_refused(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.ones((2, 3)))
    assert read_array(path, dtype=np.float64, shape=(2, 3)).tolist() == np.ones((2, 3)).tolist()
    with pytest.raises(ArrayError, match=re.escape("holds float64 (2, 3) instead of float64 (3, 2)")):
        read_array(path, dtype=np.float64, shape=(3, 2))
    path.write_bytes(header(HUGE) + bytes(1000))
    with pytest.raises(ArrayError, match="3,221,225,472 bytes, by its header; 1,000 follow"):
        read_array(path, dtype=np.float64, shape=HUGE)


@pytest.mark.parametrize("kind", ["declares more than there is", "unpacks to far more"])
def test_forged_recording_is_refused_by_name(tmp_path, kind):
    path = forged(tmp_path / "x.npz", kind)
    with pytest.raises(ValidationError, match=r"x\.npz: host (is|has) .*bytes"):
        Recorded(file=path)


def test_forged_trace_and_delays_are_refused_by_name(tmp_path, capsys):
    scenario = write(tmp_path / "run.yaml", edited())
    assert call(capsys, "simulate", scenario, "-o", tmp_path / "runs").code == 0
    run = tmp_path / "runs" / "sync"
    with zipfile.ZipFile(run / run_directory.SIMULATED) as file:
        members = {name.removesuffix(".npy"): file.read(name) for name in file.namelist()}
    archive(run / run_directory.REAL, members | {"end_s": header(HUGE) + bytes(1000)})
    answer = call(capsys, "validate", run)
    assert answer.code == 2
    assert f"{run_directory.REAL}: cannot be read as a trace (end_s is float64" in answer.err
    (run / run_directory.REAL).unlink()
    forged(run / run_directory.DELAYS, "unpacks to far more")
    answer = call(capsys, "validate", run)
    assert answer.code == 2
    assert f"{run_directory.DELAYS}: cannot be read as delays (host has 134,217,728 bytes in" in answer.err
