"""Files of execution traces are read in little memory, compressed or not; damage gets one error with its place."""

import gzip
import json
import tracemalloc

import pytest
from chakra_messages import ALL_REDUCE, EVERYTHING, HEAD, head
from google.protobuf.json_format import MessageToJson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simdist.chakra.files import read_trace, write_trace
from simdist.errors import TraceError


def framed(*messages: bytes) -> bytes:
    return b"".join(varint(len(message)) + message for message in messages)


def varint(value: int) -> bytes:
    """Return a number in seven bits a byte, the lowest first."""
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + varint(value >> 7)


HEAD_BYTES, ALL_REDUCE_BYTES, EVERYTHING_BYTES = (
    message.SerializeToString() for message in (HEAD, ALL_REDUCE, EVERYTHING)
)


WHOLE = framed(HEAD_BYTES, ALL_REDUCE_BYTES, EVERYTHING_BYTES)
NODE_AT = len(framed(HEAD_BYTES)) + 1
LAST_AT = len(framed(HEAD_BYTES, ALL_REDUCE_BYTES)) + 2  # its length takes two bytes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "job.0.et"


def read(path, content: bytes):
    path.write_bytes(content)
    return list(read_trace(path))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_trace_is_read_back_message_by_message(path, pack):
    assert read(path, pack(WHOLE)) == [HEAD, ALL_REDUCE, EVERYTHING]


def test_what_is_written_is_what_is_read(path):
    with path.open("wb") as file:
        nbytes = write_trace(file, [HEAD, ALL_REDUCE, EVERYTHING])
    assert path.read_bytes() == WHOLE
    assert nbytes == len(WHOLE)


def test_fields_that_are_not_in_the_schema_are_skipped(path):
    unknown = bytes.fromhex("980605" + "92060161" + "8906" + "00" * 8)  # 99: a number, 98: a text, 97: eight bytes
    read_head, read_node = read(path, framed(unknown + HEAD_BYTES, ALL_REDUCE_BYTES + unknown))
    assert (read_head.version, read_node.id) == (HEAD.version, ALL_REDUCE.id)
    assert len(read_node.attr) == len(ALL_REDUCE.attr)


def test_an_empty_message_at_the_end_is_the_end(path):
    assert len(read(path, WHOLE + b"\0")) == 3


def test_a_head_without_a_version_is_read(path):
    assert read(path, b"\0" + framed(ALL_REDUCE_BYTES)) == [head(""), ALL_REDUCE]


NEEDLESS = "more than 1,000 nodes are empty or have the number of another node: it is damaged"
BOMBS = {
    "empty": b"\0",
    "one node": framed(ALL_REDUCE_BYTES),
    "nodes without a number": framed(b"\x12\x01x"),
    "nodes that take turns": b"".join(framed(b"\x08" + varint(number)) for number in range(1, 4000)),
}


@pytest.mark.parametrize("repeated", BOMBS.values(), ids=BOMBS)
def test_a_few_bytes_that_unpack_to_many_messages_are_refused_soon(path, repeated):
    """A gzip of 100 MB that all repeat would take minutes to read."""
    content = gzip.compress(framed(HEAD_BYTES) + repeated * (10**8 // len(repeated)), compresslevel=1)
    path.write_bytes(content)
    n_read, said = read_until_refused(path)
    assert said.startswith(f"{path}: byte ")
    assert said.endswith(NEEDLESS)
    assert n_read <= 1 + 4000 + 1000


def read_until_refused(path) -> tuple[int, str]:
    """Return how many messages are read, and why no more are."""
    n_read = 0
    try:
        for _ in read_trace(path):
            n_read += 1
    except TraceError as error:
        return n_read, str(error)
    return n_read, ""


def test_a_thousand_empty_messages_are_read(path):
    assert len(read(path, WHOLE + bytes(1000))) == 3


def test_a_message_of_more_bytes_than_any_has_is_refused_unread(path):
    with pytest.raises(TraceError, match="byte 0: no head begins here"):
        read(path, varint(2**26 + 1) + bytes(100))


NO_HEAD = "byte 0: no head begins here: it is damaged, cut off, or no Chakra trace"
DAMAGED = {
    "empty": (b"", "is empty: a Chakra trace begins with its version"),
    "empty in gzip": (gzip.compress(b""), "is empty: a Chakra trace begins with its version"),
    "text": (b"epoch 1: loss", NO_HEAD),
    "binary": (b"\x02\x0b\x0b", NO_HEAD),
    "gigabytes": (varint(2**40) + b"x", NO_HEAD),
    "no length": (b"\xff" * 11, NO_HEAD),
    "ends in a length": (WHOLE[: LAST_AT - 1], f"byte {LAST_AT - 2}: no node begins here"),
    "ends in a message": (WHOLE[:-1], f"byte {LAST_AT - 2}: no node begins here"),
    "ends in a gzip": (gzip.compress(WHOLE)[:-9], "its compression is damaged: "),
    "changed gzip": (gzip.compress(WHOLE)[:20] + b"????" + gzip.compress(WHOLE)[24:], "its compression is damaged: "),
    "gzip of another sum": (gzip.compress(WHOLE)[:-8] + b"\0" * 8, "its compression is damaged: CRC check failed"),
    "a node as head": (framed(ALL_REDUCE_BYTES), NO_HEAD),
    "a changed byte": (WHOLE[:NODE_AT] + b"\x0a\x01x" + WHOLE[NODE_AT + 3 :], f"byte {NODE_AT - 1}: no node begins"),
    "messages of a zip": (b"PK\x03\x04" + bytes(200), NO_HEAD),
}


@pytest.mark.parametrize(("content", "problem"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_one_error_with_file_and_byte(path, content, problem):
    with pytest.raises(TraceError) as error:
        read(path, content)
    assert str(error.value).startswith(f"{path}: {problem}")
    assert "\n" not in str(error.value)


IN_JSON = {
    "execution trace of PyTorch": json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": []}, indent=2),
    "events of a profiler": json.dumps([{"ph": "X", "cat": "kernel", "name": "sgemm", "ts": 1, "dur": 2}]),
    "jsonizer": "".join(map(MessageToJson, (head(""), ALL_REDUCE))),
    "process groups": '{"0": [0, 1, 2, 3]}',
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("case", IN_JSON)
def test_json_is_told_what_is_a_trace(path, case, pack):
    with pytest.raises(TraceError, match=r"job.0.et: is JSON, no Chakra trace: import .et files"):
        read(path, pack(IN_JSON[case].encode()))


@pytest.mark.parametrize("bracket", ["{", "["])
def test_a_head_as_long_as_the_code_of_a_bracket_is_read(path, bracket):
    long = head("v" * (ord(bracket) - 2))
    with path.open("wb") as file:
        write_trace(file, [long, ALL_REDUCE])
    assert path.read_bytes().startswith(f"{bracket}\n".encode())
    assert list(read_trace(path)) == [long, ALL_REDUCE]


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
    ends = {len(framed(HEAD_BYTES)), LAST_AT - 2}
    assert {n for n in range(len(WHOLE)) if not refuses_cleanly(path, WHOLE[:n])} == ends


def test_memory_holds_one_message_at_a_time(path):
    message = framed(EVERYTHING_BYTES)
    path.write_bytes(framed(HEAD_BYTES) + message * 400)
    tracemalloc.start()
    n_read = sum(1 for _ in read_trace(path))
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n_read == 401
    assert peak_nbytes < 150_000 < len(message) * 400
