"""Messages of execution traces are the bytes that the public reader of Chakra takes."""

import sys

import pytest
from chakra_messages import ALL_REDUCE, ALL_REDUCE_HEX, EVERYTHING, EVERYTHING_HEX, HEAD, HEAD_HEX

from simdist.chakra.schema import message_classes
from simdist.errors import UnsupportedError

GOLDEN = [(HEAD, HEAD_HEX), (ALL_REDUCE, ALL_REDUCE_HEX), (EVERYTHING, EVERYTHING_HEX)]


@pytest.mark.parametrize(("message", "expected"), GOLDEN, ids=["head", "all-reduce", "every kind of attribute"])
def test_a_message_has_the_bytes_that_the_public_schema_gives_it(message, expected):
    assert message.SerializeToString().hex() == expected
    assert type(message).FromString(bytes.fromhex(expected)) == message


def test_without_protobuf_one_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    message_classes.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=r"a Chakra trace needs google.protobuf, .* install .*\[chakra\]"):
            message_classes()
    finally:
        message_classes.cache_clear()
