"""The plan (intermediate representation): one value that the simulator and the real executor both interpret."""

from typing import TYPE_CHECKING

from simdist import exporting
from simdist.plan.group import Group, Result
from simdist.plan.lanes import LANES, Lane
from simdist.plan.ops import (
    COLLECTIVES,
    LEVELS,
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
    Enter,
    Forward,
    KernelLaunch,
    Level,
    Load,
    LowRank,
    Matrix,
    Merge,
    Op,
    Optimize,
    Pack,
    Reduce,
    ReduceScatter,
    Save,
    Select,
    Server,
    Servers,
    StageIn,
    Tick,
    TrustRatios,
    Unpack,
    Wait,
    lane_of,
    reads,
    writes,
)
from simdist.plan.plan import Body, Buffer, Dataset, Plan, Run

if TYPE_CHECKING:
    from simdist.plan.codec import dumps, load, loads, save
    from simdist.plan.text import op_text, plan_text
    from simdist.plan.walk import Instance, Occurrences, occurrences

__all__ = [
    "COLLECTIVES",
    "LANES",
    "LEVELS",
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
    "Enter",
    "Forward",
    "Group",
    "Instance",
    "KernelLaunch",
    "Lane",
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
    "Reduce",
    "ReduceScatter",
    "Result",
    "Run",
    "Save",
    "Select",
    "Server",
    "Servers",
    "StageIn",
    "Tick",
    "TrustRatios",
    "Unpack",
    "Wait",
    "dumps",
    "lane_of",
    "load",
    "loads",
    "occurrences",
    "op_text",
    "plan_text",
    "reads",
    "save",
    "writes",
]

__getattr__, __dir__ = exporting(
    __name__,
    dict.fromkeys(("dumps", "load", "loads", "save"), "codec")
    | dict.fromkeys(("op_text", "plan_text"), "text")
    | dict.fromkeys(("Instance", "Occurrences", "occurrences"), "walk"),
)
