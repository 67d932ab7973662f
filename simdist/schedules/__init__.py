"""Schedules, one file each. `KINDS` finds every final `Schedule` in this package, and the schedules of users.

A user's schedule is a class in any module. A scenario names it as `kind: "module:Class"`, or by an entry point of group
`simdist.schedules`.
"""

from typing import TYPE_CHECKING

from simdist import exporting

if TYPE_CHECKING:
    from simdist.schedules.backup_workers import BackupWorkers
    from simdist.schedules.base import Schedule
    from simdist.schedules.diloco import DiLoCo
    from simdist.schedules.fsdp import FSDP
    from simdist.schedules.fusion import Fusion
    from simdist.schedules.gossip import Gossip
    from simdist.schedules.gradient import GradientSchedule
    from simdist.schedules.gtopk import GTopK
    from simdist.schedules.hierarchical_sgd import HierarchicalSGD
    from simdist.schedules.hitopk import HiTopK
    from simdist.schedules.hsdp import HSDP
    from simdist.schedules.job import InputPath, Job
    from simdist.schedules.local_sgd import LocalSGD
    from simdist.schedules.naive_ag import NaiveAllGather
    from simdist.schedules.names import KINDS, kinds, settings_of_name
    from simdist.schedules.parameter_server import ParameterServer
    from simdist.schedules.powersgd import PowerSGD
    from simdist.schedules.sync import Sync
    from simdist.schedules.torus import Torus

_MODULE_OF = {
    "BackupWorkers": "backup_workers",
    "DiLoCo": "diloco",
    "FSDP": "fsdp",
    "Fusion": "fusion",
    "GTopK": "gtopk",
    "Gossip": "gossip",
    "GradientSchedule": "gradient",
    "HSDP": "hsdp",
    "HiTopK": "hitopk",
    "HierarchicalSGD": "hierarchical_sgd",
    "InputPath": "job",
    "Job": "job",
    "KINDS": "names",
    "LocalSGD": "local_sgd",
    "NaiveAllGather": "naive_ag",
    "ParameterServer": "parameter_server",
    "PowerSGD": "powersgd",
    "Schedule": "base",
    "Sync": "sync",
    "Torus": "torus",
    "kinds": "names",
    "settings_of_name": "names",
}

__all__ = [
    "FSDP",
    "HSDP",
    "KINDS",
    "BackupWorkers",
    "DiLoCo",
    "Fusion",
    "GTopK",
    "Gossip",
    "GradientSchedule",
    "HiTopK",
    "HierarchicalSGD",
    "InputPath",
    "Job",
    "LocalSGD",
    "NaiveAllGather",
    "ParameterServer",
    "PowerSGD",
    "Schedule",
    "Sync",
    "Torus",
    "kinds",
    "settings_of_name",
]

__getattr__, __dir__ = exporting(__name__, _MODULE_OF)
