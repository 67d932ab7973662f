"""Generations of GPUs, by compute capability or by name."""

import pytest

from simdist.scenario import load_cluster, presets
from simdist.scenario.gpus import generation_of


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("Tesla P40", "pascal"),
        ("Tesla K80", "pascal"),
        ("GeForce GTX 1080 Ti", "pascal"),
        ("P100 16 GB, PCIe", "pascal"),
        ("NVIDIA GeForce RTX 2080 Ti", "volta"),
        ("Tesla V100-SXM2-32GB", "volta"),
        ("NVIDIA A10G", "ampere"),
        ("NVIDIA A800-SXM4-80GB", "ampere"),
        ("NVIDIA GeForce RTX 4090", "ampere"),
        ("NVIDIA L40S", "ampere"),
        ("NVIDIA H20", "hopper"),
        ("NVIDIA GH200 480GB", "hopper"),
        ("NVIDIA GB200", "hopper"),
        ("NVIDIA GeForce RTX 5090", "hopper"),
        ("NVIDIA RTX PRO 6000 Blackwell", "hopper"),
        ("NVIDIA A16", "ampere"),
        ("NVIDIA L20", "ampere"),
        ("Tesla V100S-PCIE-32GB", "volta"),
        ("Tesla K20m", "pascal"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI355X", "mi300x"),
        ("AMD Instinct MI100", "mi250x"),
        ("MI250X GCD 64 GB", "mi250x"),
        ("Gaudi 3", None),
        ("p5.48xlarge", None),
        ("Apple M2", None),
        ("AMD EPYC 7742", None),
        ("", None),
    ],
)
def test_a_name_tells_the_generation(name, generation):
    assert generation_of(name, None) == generation


@pytest.mark.parametrize(
    ("capability", "generation"),
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
def test_a_compute_capability_counts_before_a_name(capability, generation):
    assert generation_of("A100", capability) == generation


def test_every_preset_of_machines_has_gpus_of_a_known_generation():
    found = {name: load_cluster(presets.path("clusters", name)).device.generation for name in presets.names("clusters")}
    assert [name for name, generation in found.items() if generation is None] == []
