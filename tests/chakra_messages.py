"""Messages of execution traces for tests: every kind of attribute, and the schema in Google's protobuf.

The hexadecimal texts were made with the package mlc-chakra 1.0.0, its `et_def_pb2` under protobuf 7.36.2: each message
below was built there and written with `SerializeToString(deterministic=True)`. The exports of the presets
cloud-stragglers, cloud-gradients and cloud-data were read by that package's `protolib.decodeMessage`, as its
`chakra_jsonizer` and `chakra_visualizer` do: every node came back equal in all fields, and when it was written again it
had the same bytes.
"""

from hypothesis import strategies as st

from simdist.chakra.schema import Attribute, Io, Metadata, Node, NodeType

HEAD = Metadata("0.0.4", (Attribute("simdist_rank", "int64", 3),))
HEAD_HEX = "0a05302e302e3412100a0c73696d646973745f72616e6b4803"

ALL_REDUCE = Node(
    300,
    "all_reduce(grad.0)",
    NodeType.COMM_COLL,
    data_deps=(1, 299),
    duration_us=1500,
    attributes=(
        Attribute("is_cpu_op", "bool", False),
        Attribute("comm_type", "int64", 0),
        Attribute("comm_size", "int64", 4000),
        Attribute("pg_name", "string", "0"),
        Attribute("simdist_duration_s", "double", 0.0015),
    ),
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
EVERYTHING = Node(
    2**64 - 1,
    "é",
    NodeType.METADATA,
    ctrl_deps=(7,),
    start_us=2**40,
    inputs=Io(values="v"),
    outputs=Io(shapes="s", types="t"),
    attributes=(
        *(Attribute(kind, kind, value, "d") for kind, value in OF_EVERY_KIND.items()),
        *(Attribute(kind, kind, (value, value)) for kind, value in OF_EVERY_KIND.items()),
    ),
)
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

VALUES = {
    "double": st.floats(allow_nan=False),
    "float": st.floats(allow_nan=False, width=32),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "bool": st.booleans(),
    "string": st.text(st.characters(codec="utf-8"), max_size=20),
    "bytes": st.binary(max_size=20),
}
for wide, narrow in (("int32", ("sint32", "sfixed32")), ("int64", ("sint64", "sfixed64"))):
    VALUES |= dict.fromkeys(narrow, VALUES[wide])
VALUES |= {"fixed32": VALUES["uint32"], "fixed64": VALUES["uint64"]}


@st.composite
def attributes(draw) -> Attribute:
    kind = draw(st.sampled_from(sorted(VALUES)))
    values = VALUES[kind]
    value = draw(values | st.lists(values, max_size=4).map(tuple))
    return Attribute(draw(VALUES["string"]), kind, value, draw(VALUES["string"]))


_ios = st.builds(Io, VALUES["string"], VALUES["string"], VALUES["string"])
_ids = st.lists(VALUES["uint64"], max_size=4).map(tuple)
nodes = st.builds(
    Node,
    VALUES["uint64"],
    VALUES["string"],
    st.integers(0, 7),
    _ids,
    _ids,
    VALUES["uint64"],
    VALUES["uint64"],
    _ios,
    _ios,
    st.lists(attributes(), max_size=4).map(tuple),
)


def protobuf_classes():
    """Return the classes of GlobalMetadata and Node that Google's protobuf makes of the schema."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="ChakraProtoMsg", syntax="proto3")
    scalars = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, str, bool]):
        made = file.message_type.add(name=name)
        for field, number, kind, is_list in fields:
            label = scalars.LABEL_REPEATED if is_list else scalars.LABEL_OPTIONAL
            if kind in OF_EVERY_KIND:
                made.field.add(name=field, number=number, label=label, type=getattr(scalars, f"TYPE_{kind.upper()}"))
            else:
                type_name = f".ChakraProtoMsg.{kind}"
                made.field.add(name=field, number=number, label=label, type=scalars.TYPE_MESSAGE, type_name=type_name)
        return made

    attribute = message("AttributeProto", ("name", 1, "string", False), ("doc_string", 2, "string", False))
    attribute.oneof_decl.add(name="value")
    for n, kind in enumerate(OF_EVERY_KIND):
        message(f"{kind}_values", ("values", 1, kind, True))
        type_of = getattr(scalars, f"TYPE_{kind.upper()}")
        attribute.field.add(name=f"{kind}_val", number=3 + 2 * n, label=1, type=type_of, oneof_index=0)
        list_name = f".ChakraProtoMsg.{kind}_values"
        attribute.field.add(name=f"{kind}_list", number=4 + 2 * n, label=1, type=11, type_name=list_name, oneof_index=0)
    message("IOInfo", *((name, n, "string", False) for n, name in enumerate(("values", "shapes", "types"), 1)))
    message("GlobalMetadata", ("version", 1, "string", False), ("attr", 2, "AttributeProto", True))
    message(
        "Node",
        ("id", 1, "uint64", False),
        ("name", 2, "string", False),
        ("type", 3, "int32", False),
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("start_time_micros", 6, "uint64", False),
        ("duration_micros", 7, "uint64", False),
        ("inputs", 8, "IOInfo", False),
        ("outputs", 9, "IOInfo", False),
        ("attr", 10, "AttributeProto", True),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    names = ("ChakraProtoMsg.GlobalMetadata", "ChakraProtoMsg.Node")
    return tuple(message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names)
