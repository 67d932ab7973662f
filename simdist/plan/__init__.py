"""The plan (intermediate representation): one value that the simulator and the real executor both interpret."""

from typing import TYPE_CHECKING

from simdist import exporting
from simdist.plan.group import Group, Result
from simdist.plan.ops import (
    COLLECTIVES,
    LEVELS,
    STREAMS,
    AllGather,
    AllReduce,
    Backward,
    Broadcast,
    Channel,
    Collective,
    Combine,
    Copy,
    Delay,
    Densify,
    Forward,
    Level,
    Load,
    LowRank,
    Matrix,
    Merge,
    Op,
    Optimize,
    Pack,
    Queue,
    Reduce,
    ReduceScatter,
    Save,
    Select,
    Servers,
    StageIn,
    Stream,
    Tick,
    TrustRatios,
    Unpack,
    Wait,
    reads,
    stream_of,
    writes,
)
from simdist.plan.plan import Body, Buffer, Dataset, Plan, Run

if TYPE_CHECKING:
    from simdist.plan.codec import dumps, load, loads, save
    from simdist.plan.text import op_text, plan_text
    from simdist.plan.walk import Instance, Occurrences, occurrences

__all__ = [
    "COLLECTIVES",
    "LEVELS",
    "STREAMS",
    "AllGather",
    "AllReduce",
    "Backward",
    "Body",
    "Broadcast",
    "Buffer",
    "Channel",
    "Collective",
    "Combine",
    "Copy",
    "Dataset",
    "Delay",
    "Densify",
    "Forward",
    "Group",
    "Instance",
    "Level",
    "Load",
    "LowRank",
    "Matrix",
    "Merge",
    "Occurrences",
    "Op",
    "Optimize",
    "Pack",
    "Plan",
    "Queue",
    "Reduce",
    "ReduceScatter",
    "Result",
    "Run",
    "Save",
    "Select",
    "Servers",
    "StageIn",
    "Stream",
    "Tick",
    "TrustRatios",
    "Unpack",
    "Wait",
    "dumps",
    "load",
    "loads",
    "occurrences",
    "op_text",
    "plan_text",
    "reads",
    "save",
    "stream_of",
    "writes",
]

__getattr__ = exporting(
    __name__,
    dict.fromkeys(("dumps", "load", "loads", "save"), "codec")
    | dict.fromkeys(("op_text", "plan_text"), "text")
    | dict.fromkeys(("Instance", "Occurrences", "occurrences"), "walk"),
)
