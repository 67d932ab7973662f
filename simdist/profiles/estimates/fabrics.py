"""The links inside nodes, where no traced collective ran only there: an ordinary job on several nodes has none."""

from collections.abc import Sequence
from dataclasses import dataclass

from simdist.profiles.steps.model import RankProfile
from simdist.scenario import Link, load_cluster, presets

_NVLINK = {  # names of GPUs that only come with NVLink, as CUDA tells them -> cluster preset, which has the sources
    "V100-SXM2": "v100x8-25gbit",
    "A100-SXM4": "dgx-a100",
    "H100 80GB HBM3": "dgx-h100",  # the SXM5 module; the others are called `H100 PCIe` and `H100 NVL`
}


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links inside nodes, not measured.

    Args:
        link: One of them.
        source: Where it is from, for people.
    """

    link: Link
    source: str


def fabric_of_gpus(profiles: Sequence[RankProfile]) -> Fabric | None:
    """Return the links that the GPUs of a job have by their kind; None if that does not tell."""
    names = {profile.device_name for profile in profiles}
    kinds = {preset for name in names for kind, preset in _NVLINK.items() if kind in name and "MIG" not in name}
    if len(kinds) != 1 or not all(any(kind in name for kind in _NVLINK) for name in names):
        return None
    (preset,) = kinds
    cluster = load_cluster(presets.path("clusters", preset))
    return Fabric(cluster.fabric, f"that of the preset {preset} (NVLink), by the GPUs' name")
