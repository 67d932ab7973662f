"""Messages of execution traces are the bytes that the public reader of Chakra takes."""

import sys

import pytest
from chakra_messages import ALL_REDUCE, ALL_REDUCE_HEX, EVERYTHING, EVERYTHING_HEX, HEAD, HEAD_HEX, OF_EVERY_KIND, node

from simdist.chakra.files import find, message_classes
from simdist.errors import UnsupportedError

GOLDEN = [(HEAD, HEAD_HEX), (ALL_REDUCE, ALL_REDUCE_HEX), (EVERYTHING, EVERYTHING_HEX)]


@pytest.mark.parametrize(("message", "expected"), GOLDEN, ids=["head", "all-reduce", "every kind of attribute"])
def test_a_message_has_the_bytes_that_the_public_schema_gives_it(message, expected):
    assert message.SerializeToString().hex() == expected
    assert type(message).FromString(bytes.fromhex(expected)) == message


def test_every_kind_of_attribute_is_found_by_its_name():
    read = message_classes().node.FromString(bytes.fromhex(EVERYTHING_HEX))
    assert {kind: find(read, kind) for kind in OF_EVERY_KIND} == OF_EVERY_KIND
    assert len(OF_EVERY_KIND) == 15
    del read.attr[: len(OF_EVERY_KIND)]
    assert {kind: find(read, kind) for kind in OF_EVERY_KIND} == {kind: (v, v) for kind, v in OF_EVERY_KIND.items()}


def test_dependencies_are_read_packed_and_one_by_one():
    for data in ("280128ab02", "2a0301ab02"):
        assert list(message_classes().node.FromString(bytes.fromhex(data)).data_deps) == [1, 299]


def test_of_several_values_of_an_attribute_the_last_counts():
    assert find(message_classes().node.FromString(bytes.fromhex("52080a01784804d80101")), "x") is True


def test_an_attribute_without_a_value_and_one_that_is_not_there_are_none():
    made = node(1, "n", 4)
    made.attr.add(name="x")
    assert find(made, "x") is find(made, "y") is None


def test_without_protobuf_one_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    message_classes.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=r"a Chakra trace needs google.protobuf, .* install .*\[chakra\]"):
            message_classes()
    finally:
        message_classes.cache_clear()
