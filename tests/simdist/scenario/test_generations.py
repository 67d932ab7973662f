"""One classification of GPUs: by compute capability or by name."""

import pytest

from simdist.scenario import presets
from simdist.scenario.by_name import read_cluster
from simdist.scenario.cluster import Device
from simdist.scenario.generations import TYPICAL_LOST, generation

NAMES = {
    "pascal": ["Tesla K80", "K40m", "M60", "Tesla P4", "Tesla P40", "P100 16 GB, PCIe", "GTX 1080 Ti", "Quadro P6000"],
    "volta": ["V100 SXM2", "Tesla V100S-PCIE-32GB", "T4 16 GB", "GeForce RTX 2080 Ti", "TITAN RTX", "Quadro RTX 6000"],
    "ampere": ["A100-SXM4-80GB", "A800", "A10G", "RTX A6000", "GeForce RTX 3090", "RTX 4090", "L4", "L40S", "A30"],
    "hopper": ["H100 SXM5 80 GB", "NVIDIA H200", "H20", "GH200 480GB", "B200 SXM6", "GB200 186 GB", "B300 SXM 288 GB"],
    "amd": ["AMD Instinct MI100", "MI210", "MI250X GCD 64 GB", "MI300X 192 GB", "MI325X", "MI355X"],
}
UNKNOWN = [
    "",
    "Gaudi 3",
    "emulated",
    "x86_64",
    "TPU v4",
    "AMD EPYC 7742",
    "Intel Xeon Platinum 8480",
    "Trainium2",
    "p5.48xlarge",
    "Apple M2",
]


@pytest.mark.parametrize(("expected", "name"), [(of, name) for of, names in NAMES.items() for name in names])
def test_a_name_tells_the_generation(expected, name):
    assert generation(Device(name=name)) == expected


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_names_tell_none(name):
    assert generation(Device(name=name)) is None


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        (3.7, "pascal"),
        (6.1, "pascal"),
        (7.0, "volta"),
        (7.5, "volta"),
        (8.9, "ampere"),
        (9.0, "hopper"),
        (12.0, "hopper"),
    ],
)
def test_a_compute_capability_tells_it_for_any_name(capability, expected):
    assert generation(Device(name="T4", compute_capability=capability)) == expected


def test_each_preset_of_a_gpu_has_a_generation_with_a_typical_loss():
    found = {name: generation(read_cluster(name).device) for name in presets.names("clusters")}
    assert set(found.values()) <= set(TYPICAL_LOST), found
