"""The generation of a GPU, by which published rows are grouped, and what machines of it typically lose.

A class holds the generations whose rows are alike: `pascal` all before Volta, `volta` also Turing, `ampere` also Ada,
`hopper` all later ones, `amd` those of AMD.
"""

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from simdist.scenario.cluster import Cluster, Device
from simdist.scenario.scenario import Scenario
from simdist.scenario.workload import Workload

#: Begins the sources of what was measured on the cluster itself.
CALIBRATION = "real.calibrate"

Generation: TypeAlias = Literal["pascal", "volta", "ampere", "hopper", "amd"]

_BY_NAME: tuple[tuple[str, Generation], ...] = (  # names as nvidia-smi and rocm-smi have them, newest first
    (r"H[128]00|H20|GH200|G?B[123]00|RTX 50\d0|RTX PRO \d000", "hopper"),
    (r"A[138]00|A800|A2|A10G?|A16|A30|A40|L4|L20|L40S?|RTX [34]0\d0|RTX A?\d000 Ada|RTX A\d000", "ampere"),
    (r"V100S?|T4G?|TITAN V|TITAN RTX|RTX 20\d0|GTX 16\d0|(Quadro )?RTX [34568]000", "volta"),
    (r"K[1248]0[a-z]?|M(4|6|10|40|60)|P(4|6|40|100)|TITAN X[pP]?|GTX ([679]|10)\d0|Quadro [KMP]\d+", "pascal"),
    (r"MI\d{2,3}[AX]?", "amd"),
)
_SINCE: tuple[tuple[float, Generation], ...] = ((9, "hopper"), (8, "ampere"), (7, "volta"), (0, "pascal"))

#: Shares of forward and backward that 2 to 8 GPUs of one machine lose, in single and in mixed precision: medians of the
#: medians of published tables. From Hopper on, hosts and links are faster by more than the GPUs are, and NCCL's kernels
#: take 16 to 24 of 132 or more multiprocessors for a shorter time. No table is of AMD's GPUs: theirs is between those
#: of Volta and Ampere.
#:
#: Source:
#:     K80 and P100: tensorflow.org/performance/benchmarks (single 3.1, 5.4, 7.4 %; mixed precision saves them little).
#:     V100: NVIDIA/DeepLearningExamples, Oneflow-Inc/DLPerf, lambdal/deeplearning-benchmark, mvsjober/ml-benchmarks
#:     (single 4.8, 5.3, 5.5, 5.0 %; mixed 19, 11, 13, 7, 11 %). A100: NVIDIA/DeepLearningExamples,
#:     mvsjober/ml-benchmarks (single 2.7, 1.8 %; mixed 4.3, 5.6 %). H100: lambdal/deeplearning-benchmark (1.1, 1.5 %).
TYPICAL_LOST: Mapping[Generation, tuple[float, float]] = {
    "pascal": (0.05, 0.05),
    "volta": (0.052, 0.114),
    "ampere": (0.023, 0.05),
    "hopper": (0.011, 0.015),
    "amd": (0.05, 0.05),
}


def generation(device: Device) -> Generation | None:
    """Return the generation of a GPU, by its compute capability or else its name; None if neither tells it.

    >>> generation(Device(name="Tesla P40")), generation(Device(compute_capability=8.9)), generation(Device(name="X1"))
    ('pascal', 'ampere', None)
    """
    if device.compute_capability is not None:
        return next(each for least, each in _SINCE if device.compute_capability >= least)
    return next((each for names, each in _BY_NAME if re.search(rf"\b({names})\b", device.name, re.IGNORECASE)), None)


def is_mixed(workload: Workload) -> bool:
    """Tell whether passes compute in 16 bits."""
    return workload.precision in ("fp16", "bf16")


def is_calibrated(cluster: Cluster) -> bool:
    """Tell whether `real.calibrate` measured the cluster."""
    return any(each.source.startswith(CALIBRATION) for each in cluster.uncertain.values())


def unknown_gpu(scenario: Scenario) -> str | None:
    """Return the name of the GPU if nothing is known of errors on such; None if something is, or nothing need be.

    A job or a cluster that was measured needs no published rows. A GPU without a name has an empty one.
    """
    cluster = scenario.cluster
    if generation(cluster.device) is not None or scenario.imported or is_calibrated(cluster):
        return None
    return cluster.device.name if scenario.is_of_machines else None
