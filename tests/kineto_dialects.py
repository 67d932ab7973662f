"""How profilers of several PyTorch versions spell what they saw.

Sources: pytorch/kineto `libkineto/src/output_json.cpp`, `ActivityType.cpp` and `CuptiActivity.cpp` over time, its
`tb_plugin/test`; pytorch/kineto#890, #919 and #928 (times); NCCL's kernel names from 2.7 to 2.22.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Differences between versions.

    `fine_times`: in nanoseconds, and since a base time that the file tells; else whole microseconds since 1970.
    `gpu_ids`: streams are text (`stream 7`) or numbers. `comms`: what `record_param_comms` tells about a collective.
    """

    op: str = "cpu_op"
    annotation: str = "user_annotation"
    kernel: str = "kernel"
    runtime: str = "cuda_runtime"
    memcpy: str = "gpu_memcpy"
    external_id: str = "External id"
    gpu_annotations: bool = True
    fine_times: bool = True
    text_ids: bool = False
    node: str = "AddmmBackward0"
    evaluate_function: bool = True
    c10d_op: bool = True
    names_forward: bool = True
    nccl: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
    nccl_broadcast: str = "ncclDevKernel_Broadcast_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
    comms: Literal["none", "bare", "msg size", "msg nelems"] = "msg nelems"
    tells_ranks: bool = True
    world: Literal["none", "size", "groups"] = "groups"
    host_name: bool = False


_NOW = Dialect()
_2_2 = replace(_NOW, fine_times=False, tells_ranks=False)
_2_0 = replace(
    _2_2,
    nccl="ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
    nccl_broadcast="ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
    comms="bare",
    world="size",
)
_1_13 = replace(_2_0, nccl="ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", c10d_op=False)
_1_8 = replace(
    _1_13,
    op="Operator",
    annotation="Operator",
    kernel="Kernel",
    runtime="Runtime",
    memcpy="Memcpy",
    external_id="external id",
    gpu_annotations=False,
    text_ids=True,
    node="AddmmBackward",
    evaluate_function=False,
    names_forward=False,
    nccl="ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
    nccl_broadcast="ncclBroadcastRingLLKernel_copy_i8(ncclColl)",
    comms="none",
    world="none",
)
DIALECTS = {
    "1.8": _1_8,
    "1.13": _1_13,
    "2.0": _2_0,
    "2.1": replace(_2_0, comms="msg size"),
    "2.2": _2_2,
    "2.4": _NOW,
    "2.6": _NOW,
    "2.13": replace(
        _NOW, nccl="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", host_name=True
    ),
}
