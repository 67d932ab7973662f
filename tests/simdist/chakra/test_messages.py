"""Messages of execution traces are the bytes that the public reader of Chakra takes; damage is told, not guessed at."""

import pytest
from chakra_messages import (
    ALL_REDUCE,
    ALL_REDUCE_HEX,
    EVERYTHING,
    EVERYTHING_HEX,
    HEAD,
    HEAD_HEX,
    OF_EVERY_KIND,
    nodes,
    protobuf_classes,
)
from hypothesis import given
from hypothesis import strategies as st

from simdist.chakra.messages import decode_metadata, decode_node, encode_metadata, encode_node
from simdist.chakra.schema import Attribute, Node
from simdist.chakra.wire import VARINT, DamageError, encoded, fields, read_varint, varint

GOLDEN = [(ALL_REDUCE, ALL_REDUCE_HEX), (EVERYTHING, EVERYTHING_HEX)]


@pytest.mark.parametrize(("node", "expected"), GOLDEN, ids=["all-reduce", "every kind of attribute"])
def test_a_node_has_the_bytes_that_the_public_schema_gives_it(node, expected):
    assert encode_node(node).hex() == expected
    assert decode_node(bytes.fromhex(expected)) == node


def test_a_head_has_the_bytes_that_the_public_schema_gives_it():
    assert encode_metadata(HEAD).hex() == HEAD_HEX
    assert decode_metadata(bytes.fromhex(HEAD_HEX)) == HEAD


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_varint_is_read_back(value):
    data = varint(value)
    assert len(data) <= 10
    assert read_varint(data, 0, len(data)) == (value % 2**64, len(data))


@given(nodes)
def test_a_node_is_read_back_equal(node):
    assert decode_node(encode_node(node)) == node


@pytest.fixture(scope="module")
def protobuf():
    reason = "the independent decoder is Google's protobuf, which is not installed: pip install protobuf"
    pytest.importorskip("google.protobuf", reason=reason)
    return protobuf_classes()


@given(node=nodes)
def test_protobuf_reads_what_is_written_and_writes_what_is_read(protobuf, node):
    theirs = protobuf[1].FromString(encode_node(node))
    assert (theirs.id, theirs.name, theirs.type) == (node.id, node.name, node.type)
    assert (tuple(theirs.ctrl_deps), tuple(theirs.data_deps)) == (node.ctrl_deps, node.data_deps)
    assert (theirs.start_time_micros, theirs.duration_micros) == (node.start_us, node.duration_us)
    for their, ours in zip(theirs.attr, node.attributes, strict=True):
        field = their.WhichOneof("value")
        value = getattr(their, field)
        assert field == f"{ours.kind}_{'list' if isinstance(ours.value, tuple) else 'val'}"
        assert (tuple(value.values) if field.endswith("_list") else value) == ours.value
        assert (their.name, their.doc_string) == (ours.name, ours.doc)
    assert decode_node(theirs.SerializeToString()) == node


def test_fields_that_are_not_in_the_schema_are_skipped():
    unknown = b"".join([*encoded(99, VARINT, 5), *encoded(98, 2, b"later"), *encoded(97, 1, bytes(8))])
    assert decode_node(encode_node(ALL_REDUCE) + unknown) == ALL_REDUCE
    assert decode_metadata(unknown + encode_metadata(HEAD)) == HEAD


def test_dependencies_are_read_packed_and_one_by_one():
    one_by_one = b"".join([*encoded(5, VARINT, 1), *encoded(5, VARINT, 299)])
    assert decode_node(one_by_one).data_deps == decode_node(bytes.fromhex("2a0301ab02")).data_deps == (1, 299)


def test_of_several_values_of_an_attribute_the_last_counts():
    twice = b"".join([*encoded(1, 2, b"x"), *encoded(9, VARINT, 4), *encoded(27, VARINT, 1)])
    assert decode_node(b"".join(encoded(10, 2, twice))).attributes == (Attribute("x", "bool", True),)


def test_an_attribute_without_a_value_is_none():
    node = Node(1, "n", 4, attributes=(Attribute("x", "double", None),))
    assert decode_node(encode_node(node)).find("x") is None


@pytest.mark.parametrize(
    ("data", "at", "problem"),
    [
        ("08", 1, "a number without end"),
        ("08ffff", 1, "a number without end"),
        ("08" + "ff" * 11, 1, "a number of more than 10 bytes"),
        ("08" + "ff" * 9 + "02", 1, "a number of more than 64 bits"),
        ("00", 0, "a field of number 0; they go from 1 to 536870911"),
        ("0b", 0, "field 1 is of wire type 3; there are 0, 1, 2 and 5"),
        ("1205616263", 0, "field 2 goes 2 bytes beyond its message"),
        ("0d00000000", 1, "field 1 is of wire type 5, not 0"),
        ("1001", 1, "field 2 is of wire type 0, not 2"),
        ("1202c328", 2, "field 2 is no UTF-8 text"),
        ("2d00000000", 1, "field 5 is of wire type 5, not 0"),
        ("2a0180", 2, "a number without end"),
        ("5203180000", 3, "field 3 is of wire type 0, not 1"),
        ("520522030a0100", 6, "field 1 ends in the middle of a number"),
        ("4201ff", 2, "a number without end"),
    ],
)
def test_damage_is_told_with_its_place(data, at, problem):
    with pytest.raises(DamageError) as error:
        decode_node(bytes.fromhex(data))
    assert (str(error.value), error.value.at) == (problem, at)


def damage_at(decode, data: bytes) -> int | None:
    """Return where a message is damaged, if it is; nothing else may be raised."""
    try:
        decode(data)
    except DamageError as error:
        return error.at
    return None


@given(st.binary(max_size=200), st.sampled_from([decode_node, decode_metadata]))
def test_bytes_of_all_kinds_are_read_or_refused(data, decode):
    assert damage_at(decode, data) in (None, *range(len(data) + 1))


@given(nodes, st.data())
def test_a_node_with_a_changed_byte_is_read_or_refused(node, data):
    message = bytearray(encode_node(node) or b"\x08\x01")
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    assert damage_at(decode_node, bytes(message)) in (None, *range(len(message) + 1))


def test_every_kind_of_the_schema_is_tested():
    assert len(OF_EVERY_KIND) == 15
    assert [field.number for field in fields(bytes.fromhex(HEAD_HEX), 0, len(HEAD_HEX) // 2)] == [1, 2]
