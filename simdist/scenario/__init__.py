"""Scenarios, as users write them: machines, a training job, disturbances and the schedules to compare."""

from simdist.scenario.cluster import Cluster, Device, DeviceOverride, Disk, HostMemory, Library, Storage
from simdist.scenario.disturbances import (
    Bursts,
    Drawn,
    Exponential,
    HeavyTail,
    Interference,
    Jitter,
    Pauses,
    Persistent,
    Recorded,
    Transient,
    UnevenWork,
)
from simdist.scenario.facts import Imported
from simdist.scenario.link import Link, TablePoint
from simdist.scenario.loading import dump_cluster, dump_workload, load_cluster, load_failures, load_workload
from simdist.scenario.sampling import sampler
from simdist.scenario.scenario import AnyScenario, Host, InputSettings, Scenario, dump, load, loads
from simdist.scenario.uncertain import Range
from simdist.scenario.workload import Tensor, Workload

__all__ = [
    "AnyScenario",
    "Bursts",
    "Cluster",
    "Device",
    "DeviceOverride",
    "Disk",
    "Drawn",
    "Exponential",
    "HeavyTail",
    "Host",
    "HostMemory",
    "Imported",
    "InputSettings",
    "Interference",
    "Jitter",
    "Library",
    "Link",
    "Pauses",
    "Persistent",
    "Range",
    "Recorded",
    "Scenario",
    "Storage",
    "TablePoint",
    "Tensor",
    "Transient",
    "UnevenWork",
    "Workload",
    "dump",
    "dump_cluster",
    "dump_workload",
    "load",
    "load_cluster",
    "load_failures",
    "load_workload",
    "loads",
    "sampler",
]
