"""What an event of a trace means for training: decided once per category and name, then looked up.

Names are those that PyTorch gives to its own operators and annotations; what users annotate themselves only wraps
other events and means nothing here.

Source: torch/optim/optimizer.py, torch/utils/data/dataloader.py, torch/nn/parallel/distributed.py,
    torch/csrc/autograd/engine.cpp and torch/csrc/distributed/c10d of https://github.com/pytorch/pytorch.
"""

import re
from enum import IntEnum


class What(IntEnum):
    """What an event is, as far as it matters to the phases of a step.

    On a host's thread: `WRAPPER` encloses others and is no work of its own; `STEP` is the profiler's mark of a step;
    `INPUT` the data loader's next batch; `FORWARD` that of a DDP module; `OPTIMIZER` an update; `BACKWARD` a node of
    the backward graph with all that belongs to it, and `NODE` without; `READY` a gradient; `COPY_BACK` reduced
    gradients copied from their bucket; `ISSUE` a collective handed over; `TRANSFER` a collective on a thread of its
    backend; `LAYER` an operator whose input tells the batch size; `WORK` any other operator; `LAUNCH` hands work to the
    device; `SYNC` waits for the device; `BLOCKING` does both. On a device: `KERNEL`, `COLLECTIVE`, `COPY_IN` from the
    host, `COPY` any other.
    """

    WRAPPER = 0
    STEP = 1
    INPUT = 2
    FORWARD = 3
    OPTIMIZER = 4
    BACKWARD = 5
    NODE = 6
    READY = 7
    COPY_BACK = 8
    ISSUE = 9
    TRANSFER = 10
    LAYER = 11
    WORK = 12
    LAUNCH = 13
    SYNC = 14
    BLOCKING = 15
    KERNEL = 16
    COLLECTIVE = 17
    COPY_IN = 18
    COPY = 19


def meaning_of(category: str, name: str) -> What | None:
    """Return what an event means; None if it says nothing about training.

    Example:
        >>> meaning_of("user_annotation", "Optimizer.step#SGD.step")
        <What.OPTIMIZER: 4>
        >>> meaning_of("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
        <What.COLLECTIVE: 17>
        >>> meaning_of("ac2g", "ac2g") is None
        True
    """
    match category:
        case "cpu_op" | "user_annotation":
            return _on_host(category, name)
        case "cuda_runtime" | "cuda_driver":
            return _call_of_driver(name)
        case "kernel":
            return What.COLLECTIVE if _is_collective_kernel(name) else What.KERNEL
        case "gpu_memcpy" | "gpu_memset":
            return What.COPY_IN if "HtoD" in name or "HostToDevice" in name else What.COPY
        case _:
            return None


_PREFIXES = (
    ("ProfilerStep#", What.STEP),
    ("enumerate(DataLoader)#", What.INPUT),
    ("DistributedDataParallel.forward", What.FORWARD),
    ("Optimizer.step#", What.OPTIMIZER),
    ("Optimizer.zero_grad#", What.WORK),
    ("autograd::engine::evaluate_function", What.BACKWARD),
    ("torch::autograd::AccumulateGrad", What.READY),
    ("torch.distributed.ddp.reducer::copy_bucket_to_grad", What.COPY_BACK),
    ("gloo:", What.TRANSFER),
    ("mpi:", What.TRANSFER),
    ("ucc:", What.TRANSFER),
    ("nccl:", What.ISSUE),
    ("c10d::", What.ISSUE),
    ("record_param_comms", What.ISSUE),
)
_NODE = re.compile(r"Backwards?\d*$")
_LAYERS = frozenset(f"aten::{name}" for name in ("conv1d", "conv2d", "conv3d", "linear", "embedding"))


def _on_host(category: str, name: str) -> What:
    if name in _LAYERS:
        return What.LAYER
    for prefix, what in _PREFIXES:
        if name.startswith(prefix):
            return what
    if _NODE.search(name) and not name.startswith("aten::"):
        return What.NODE
    return What.WRAPPER if category == "user_annotation" else What.WORK


def _call_of_driver(name: str) -> What | None:
    """Tell the calls that launch or wait from the many others, by parts of their names: CUDA's and HIP's alike."""
    lower = name.lower()
    if "synchronize" in lower:
        return What.SYNC
    if "launch" in lower or "memset" in lower:
        return What.LAUNCH
    if "memcpy" in lower:
        return What.LAUNCH if "async" in lower else What.BLOCKING
    return None


def _is_collective_kernel(name: str) -> bool:
    lower = name.lower()
    return "nccldev" in lower or "ncclkernel" in lower or lower.startswith(("nccl", "rccl", "msccl"))
