"""Messages of execution traces for tests: every kind of attribute, and the bytes of the public schema.

The hexadecimal texts were made with the package mlc-chakra 1.0.0, its `et_def_pb2` under protobuf 7.36.2: each message
below was built there and written with `SerializeToString(deterministic=True)`. The exports of the presets
cloud-stragglers, cloud-gradients and cloud-data were read by that package's `protolib.decodeMessage`, as its
`chakra_jsonizer` and `chakra_visualizer` do: every node came back equal in all fields, and when it was written again it
had the same bytes.
"""

from pathlib import Path

from google.protobuf.proto import parse_length_prefixed

from simdist.chakra.schema import NodeType, add_attribute, message_classes

Attribute = tuple[str, str, object]
"""Name, type and value."""


def node(id_: int, name: str, type_: int, *attributes: Attribute, **fields):
    made = message_classes().node(id=id_, name=name, type=type_, **fields)
    add_all(made, attributes)
    return made


def head(version: str, *attributes: Attribute):
    made = message_classes().head(version=version)
    add_all(made, attributes)
    return made


def find(message, name: str):
    """Return the value of an attribute; None if the attribute or its value is missing."""
    attribute = next((each for each in message.attr if each.name == name), None)
    field = attribute and attribute.WhichOneof("value")
    if not field:
        return None
    return tuple(getattr(attribute, field).values) if field.endswith("_list") else getattr(attribute, field)


def read_trace(path: Path):
    """Yield the head of a trace, then its nodes, read by protobuf itself."""
    with path.open("rb") as file:
        yield parse_length_prefixed(message_classes().head, file)
        while (read := parse_length_prefixed(message_classes().node, file)) is not None:
            yield read


def add_all(message, attributes) -> None:
    for name, kind, value in attributes:
        add_attribute(message, name, kind, value)


HEAD = head("0.0.4", ("simdist_rank", "int64", 3))
HEAD_HEX = "0a05302e302e3412100a0c73696d646973745f72616e6b4803"

ALL_REDUCE = node(
    300,
    "all_reduce(grad.0)",
    NodeType.COMM_COLL,
    ("is_cpu_op", "bool", False),
    ("comm_type", "int64", 0),
    ("comm_size", "int64", 4000),
    ("pg_name", "string", "0"),
    ("simdist_duration_s", "double", 0.0015),
    data_deps=(1, 299),
    duration_micros=1500,
)
ALL_REDUCE_HEX = (
    "08ac021212616c6c5f72656475636528677261642e302918072a0301ab0238dc0b520e0a0969735f6370755f6f70d80100520d0a09636f6d6d"
    "5f747970654800520e0a09636f6d6d5f73697a6548a01f520d0a0770675f6e616d65ea010130521d0a1273696d646973745f6475726174696f"
    "6e5f7319fa7e6abc7493583f"
)

OF_EVERY_KIND = {
    "double": -0.5,
    "float": 0.25,
    "int32": -1,
    "int64": -(2**63),
    "uint32": 2**32 - 1,
    "uint64": 2**64 - 1,
    "sint32": -(2**31),
    "sint64": 2**63 - 1,
    "fixed32": 1,
    "fixed64": 2,
    "sfixed32": -3,
    "sfixed64": -4,
    "bool": True,
    "string": "x",
    "bytes": b"\xff",
}
EVERYTHING = node(
    2**64 - 1,
    "é",
    NodeType.METADATA,
    ctrl_deps=(7,),
    start_time_micros=2**40,
    inputs={"values": "v"},
    outputs={"shapes": "s", "types": "t"},
)
for _kind, _value in OF_EVERY_KIND.items():
    EVERYTHING.attr.add(name=_kind, doc_string="d", **{f"{_kind}_val": _value})
for _kind, _value in OF_EVERY_KIND.items():
    EVERYTHING.attr.add(name=_kind, **{f"{_kind}_list": {"values": [_value, _value]}})
EVERYTHING_HEX = (
    "08ffffffffffffffffff011202c3a918012201073080808080802042030a01764a061201731a017452140a06646f75626c6512016419000000"
    "000000e0bf520f0a05666c6f61741201642d0000803e52150a05696e74333212016438ffffffffffffffffff0152150a05696e743634120164"
    "488080808080808080800152110a0675696e74333212016458ffffffff0f52160a0675696e74363412016468ffffffffffffffffff0152110a"
    "0673696e74333212016478ffffffff0f52170a0673696e7436341201648801feffffffffffffffff0152120a07666978656433321201649d01"
    "0100000052160a0766697865643634120164a901020000000000000052130a087366697865643332120164bd01fdffffff52170a0873666978"
    "65643634120164c901fcffffffffffffff520c0a04626f6f6c120164d80101520f0a06737472696e67120164ea010178520e0a056279746573"
    "120164fa0101ff521c0a06646f75626c6522120a10000000000000e0bf000000000000e0bf52130a05666c6f6174320a0a080000803e000080"
    "3e521f0a05696e74333242160a14ffffffffffffffffff01ffffffffffffffffff01521f0a05696e74363452160a1480808080808080808001"
    "8080808080808080800152160a0675696e743332620c0a0affffffff0fffffffff0f52200a0675696e74363472160a14ffffffffffffffffff"
    "01ffffffffffffffffff0152170a0673696e74333282010c0a0affffffff0fffffffff0f52210a0673696e7436349201160a14feffffffffff"
    "ffffff01feffffffffffffffff0152160a0766697865643332a2010a0a080100000001000000521e0a0766697865643634b201120a10020000"
    "0000000000020000000000000052170a087366697865643332c2010a0a08fdfffffffdffffff521f0a087366697865643634d201120a10fcff"
    "fffffffffffffcffffffffffffff520d0a04626f6f6ce201040a02010152110a06737472696e67f201060a01780a017852100a056279746573"
    "8202060a01ff0a01ff"
)
