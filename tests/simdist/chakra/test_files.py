"""Files of execution traces are read in little memory, compressed or not; damage gets one error with its place."""

import gzip
import tracemalloc

import pytest
from chakra_messages import ALL_REDUCE, EVERYTHING, HEAD, nodes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simdist.chakra.files import MAX_MESSAGE_NBYTES, read_trace, write_trace
from simdist.chakra.messages import encode_metadata, encode_node
from simdist.chakra.schema import Metadata, Node
from simdist.chakra.wire import varint
from simdist.errors import TraceError


def framed(*messages: bytes) -> bytes:
    return b"".join(varint(len(message)) + message for message in messages)


WHOLE = framed(encode_metadata(HEAD), encode_node(ALL_REDUCE), encode_node(EVERYTHING))
NODE_AT = len(framed(encode_metadata(HEAD))) + 1
LAST_AT = len(framed(encode_metadata(HEAD), encode_node(ALL_REDUCE))) + 2  # its length takes two bytes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "job.0.et"


def read(path, content: bytes) -> list[Metadata | Node]:
    path.write_bytes(content)
    return list(read_trace(path))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_trace_is_read_back_message_by_message(path, pack):
    assert read(path, pack(WHOLE)) == [HEAD, ALL_REDUCE, EVERYTHING]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(nodes.filter(lambda node: encode_node(node)), max_size=4))
def test_what_is_written_is_read(path, written):
    with path.open("wb") as file:
        nbytes = write_trace(file, HEAD, written)
    assert path.stat().st_size == nbytes
    assert list(read_trace(path)) == [HEAD, *written]


def test_an_empty_message_at_the_end_is_the_end(path):
    assert len(read(path, WHOLE + b"\0")) == 3


def test_a_head_without_a_version_is_read(path):
    assert read(path, b"\0" + framed(encode_node(ALL_REDUCE))) == [Metadata(""), ALL_REDUCE]


DAMAGED = {
    "empty": (b"", "is empty: a Chakra trace begins with its version"),
    "empty in gzip": (gzip.compress(b""), "is empty: a Chakra trace begins with its version"),
    "text": (b'{"nodes": []}', "byte 1: ends 111 bytes before the end of a message: it is cut off, or no Chakra trace"),
    "binary": (b"\x02\x0b\x0b", "byte 1: field 1 is of wire type 3; there are 0, 1, 2 and 5, in the head"),
    "gigabytes": (varint(2**31) + b"x", "byte 5: a message of 2,147,483,648 bytes, when a node has some hundreds"),
    "no length": (b"\xff" * 8, "byte 0: a length of more than 5 bytes: it is no Chakra trace"),
    "ends in a length": (WHOLE[: LAST_AT - 1], f"byte {LAST_AT - 2}: ends in the middle of a message's length"),
    "ends in a message": (WHOLE[:-1], f"byte {LAST_AT}: ends 1 bytes before the end of a message"),
    "ends in a gzip": (gzip.compress(WHOLE)[:-9], "its compression is damaged: "),
    "changed gzip": (gzip.compress(WHOLE)[:20] + b"????" + gzip.compress(WHOLE)[24:], "its compression is damaged: "),
    "gzip of another sum": (gzip.compress(WHOLE)[:-8] + b"\0" * 8, "its compression is damaged: CRC check failed"),
    "a node of length 0": (
        framed(encode_metadata(HEAD), b"") + WHOLE,
        "byte 27: a message of length 0, which ends a trace, and more behind it",
    ),
    "a node as head": (framed(encode_node(ALL_REDUCE)), "byte 2: field 1 is of wire type 0, not 2, in the head"),
    "a changed byte": (
        WHOLE[:NODE_AT] + b"\x0d\0\0\0\0" + WHOLE[NODE_AT + 5 :],
        f"byte {NODE_AT + 1}: field 1 is of wire type 5, not 0, in a node that begins at byte {NODE_AT}",
    ),
    "messages of a zip": (b"PK\x03\x04" + bytes(200), "byte 1: field 9 is of wire type 3"),
}


@pytest.mark.parametrize(("content", "problem"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_one_error_with_file_and_byte(path, content, problem):
    with pytest.raises(TraceError) as error:
        read(path, content)
    assert str(error.value).startswith(f"{path}: {problem}")
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_told(tmp_path):
    for path, problem in ((tmp_path / "none.et", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(TraceError, match=f"cannot be read: {problem}"):
            list(read_trace(path))


def refuses_cleanly(path, content: bytes) -> bool:
    """Return whether a file is refused, or else read; nothing but a TraceError may be raised."""
    path.write_bytes(content)
    try:
        for _ in read_trace(path):
            pass
    except TraceError:
        return True
    return False


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.booleans())
def test_a_file_with_a_changed_byte_is_read_or_refused(path, at, byte, is_compressed):
    whole = gzip.compress(WHOLE) if is_compressed else WHOLE
    at %= len(whole)
    assert refuses_cleanly(path, whole[:at] + bytes([byte]) + whole[at + 1 :]) in (True, False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_a_file_of_anything_is_read_or_refused(path, content):
    assert refuses_cleanly(path, content) in (True, False)


def test_every_file_that_ends_early_is_refused_or_ends_between_messages(path):
    ends = {len(framed(encode_metadata(HEAD))), LAST_AT - 2}
    assert {n for n in range(len(WHOLE)) if not refuses_cleanly(path, WHOLE[:n])} == ends


def test_memory_holds_one_message_at_a_time(path):
    message = framed(encode_node(EVERYTHING))
    path.write_bytes(framed(encode_metadata(HEAD)) + message * 400)
    tracemalloc.start()
    n_read = sum(1 for _ in read_trace(path))
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n_read == 401
    assert peak_nbytes < 150_000 < len(message) * 400 < MAX_MESSAGE_NBYTES
