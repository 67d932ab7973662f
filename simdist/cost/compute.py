"""Cost of computation: seconds per operation and rank, from measured step times or from FLOPs and memory traffic."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simdist.errors import ScenarioError
from simdist.plan import Buffer, Copy, Densify, KernelLaunch, LowRank, Op, Optimize, Select, TrustRatios
from simdist.plan.ops import launch_kind
from simdist.plan.optimizers import OPTIMIZERS
from simdist.plan.plan import ITEM_NBYTES
from simdist.scenario.cluster import Cluster
from simdist.scenario.workload import MeasuredStep, Workload
from simdist.settings.precision import Precision
from simdist.settings.units import format_seconds

#: Reads of the vector by the kernels of `real.kernels` on a GPU, at densities of up to 1 %. Writes count as reads.
#:
#: exact: reads and writes magnitudes; then torch's radix select counts four digits of 8 bits and gathers the result.
#: mstopk: reads the vector once. The rest is maxima of groups, a second pass over some groups, and candidates. As
#: published it takes 22 with 20 bisections: mean, maximum, and a count for each (Shi et al., arXiv 2010.10458,
#: algorithm 1). dgc: reads the vector once. The rest is a sample of 1 % at scattered places, and candidates.
#: Kernels do not reach the bandwidth of the memory: on an H200, 2^28 elements of float32 take as long as 22 (exact), 2
#: to 3.5 (mstopk) and 4 to 5 (dgc) reads. Shorter vectors take more (experiments/gpu).
_SELECT_PASSES = {"exact": 7.0, "mstopk": 1.5, "dgc": 1.5}

#: Error feedback adds the gradient to the residual, which it reads and writes. The selection reads the sum again.
_RESIDUAL_PASSES = 2

#: Radix sorts by index and by magnitude, 8 of 32 bits per pass: each of 4 passes reads and writes. Plus two scans.
_MERGE_PASSES = 18


#: Reads and writes of the matrices by a stage of `LowRank`, besides the product with a factor. The product reads them
#: once (left, right) or writes them (product). left adds them to the residual; product subtracts the result from it.
_LOW_RANK_PASSES = {"left": 3, "right": 0, "product": 3}


def compute_s(workload: Workload, cluster: Cluster) -> NDArray[np.float64]:
    """Return forward plus backward seconds of all passes of one step, shape `[world_size]`."""
    cost = ComputeCost(workload, cluster)
    return workload.micro_batches * (cost.forward_s + cost.backward_s) / cluster.device_speed()


def tensor_backward_s(workload: Workload, cluster: Cluster) -> tuple[float, ...]:
    """Return the backward seconds of every tensor in one pass, in forward order, on an undisturbed device."""
    return ComputeCost(workload, cluster).tensor_backward_s()


class ComputeCost:
    """Prices of the operations on the compute stream.

    Forward seconds are the workload's, a third of its measured steps, or `FLOPs * batch / (peak * utilization)`, with
    peak and utilization for the workload's precision. A backward pass without seconds of its own takes twice as long:
    one product for the gradient of the weights, one for the gradient of the inputs. Activation checkpointing repeats a
    share of the forward pass (`recompute`). A tensor's share of a pass is its share of the FLOPs. If a pass was
    measured per tensor, it is the tensor's seconds.

    Raises:
        ScenarioError: Times are neither given nor derivable.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload = workload
        self._device = cluster.device
        self._launches = cluster.host.launches
        speed = cluster.device_speed()
        self._speed: float | NDArray[np.float64] = float(speed[0]) if (speed == speed[0]).all() else speed
        weights = np.array([tensor.flops for tensor in workload.tensors], dtype=np.float64)
        if not weights.any():
            weights = np.array([tensor.count for tensor in workload.tensors], dtype=np.float64)
        self._share_before = _share_before(weights)
        self._backward_share_before = self._share_before
        n_passes = 2.0
        if workload.recompute:
            backward_weights = weights * (2 + np.array(workload.recomputed_shares))
            self._backward_share_before = _share_before(backward_weights)
            n_passes = float(backward_weights.sum() / weights.sum())
        self.forward_s = self._forward_s(n_passes)
        self.backward_s = n_passes * self.forward_s if workload.backward_s is None else workload.backward_s
        measured_s = np.array([tensor.backward_s for tensor in workload.tensors if tensor.backward_s is not None])
        if measured_s.size:  # for all tensors or none
            self.backward_s = float(measured_s.sum())
        if measured_s.any():
            self._backward_share_before = _share_before(measured_s)
        forward_s = np.array([tensor.forward_s for tensor in workload.tensors if tensor.forward_s is not None])
        if forward_s.any():
            self._share_before = _share_before(forward_s)
        if workload.stated_forward_s is not None:  # the other times are of this batch size
            self.forward_s *= workload.batch_over_measured
            self.backward_s *= workload.batch_over_measured

    @property
    def hides_launches(self) -> bool:
        """Whether each pass takes the fastest device at least as long as its host takes to launch it."""
        launches = self._workload.launches
        fastest = float(np.max(self._speed))
        return (
            launches.forward_s <= self.forward_s / fastest
            and launches.backward_s + launches.optimize_s <= self.backward_s / fastest
        )

    def launch(self, op: KernelLaunch) -> float:
        """Return the host's seconds for launching an operation: of a pass or an update, by its share of the tensors."""
        if op.n_tensors:
            return self._workload.launches.of(op.kind) * op.n_tensors / len(self._workload.tensors)
        return self._launches.of(op.kind)

    def at_least(self, op: Op, seconds: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
        """Return the seconds of an operation on the device, not less than what the device states for its kind.

        What takes no time, such as the copy of a rank that copies nothing, stays so.
        """
        kind = launch_kind(op)
        floor_s = self._device.floors.of(kind) if kind else 0.0
        if not floor_s:
            return seconds
        if isinstance(seconds, np.ndarray):
            return np.where(seconds > 0, np.maximum(seconds, floor_s), seconds)
        return max(seconds, floor_s)

    def _forward_s(self, n_backward: float) -> float:
        """Return the seconds of a forward pass. A backward pass is as much work as `n_backward` of these."""
        workload = self._workload
        if workload.step_times:
            return self._passes_s() / (1 + n_backward)
        if workload.stated_forward_s is not None:
            return workload.stated_forward_s
        peaks = self._device.peak_flops
        flops = workload.batch_size * workload.flops
        peak = peaks.at(workload.precision)
        share = workload.utilization.at(workload.precision)
        if peak is None or share is None or not flops:
            raise ScenarioError(
                f"workload.forward is not given and cannot be derived: that takes FLOPs per tensor, and "
                f"{workload.precision} both in workload.utilization (stated: {_listed(workload.utilization.stated)}) "
                f"and in cluster.device.peak (stated: {_listed(peaks.stated)}); give e.g. `forward: 20 ms`"
            )
        return flops / (peak * share)

    def _passes_s(self) -> float:
        """Return the seconds of a forward and a backward pass: those of a step without its update."""
        workload = self._workload
        whole_s = interpolated_step_s(workload.step_times, workload.batch_size)
        update_s = workload.optimize_s
        if update_s is None:
            update_s = OPTIMIZERS[workload.optimizer].n_passes * workload.nbytes / self._device.memory_bandwidth_Bps
        if update_s >= whole_s:
            raise ScenarioError(
                f"workload.step_times: a step of batch size {workload.batch_size} takes {format_seconds(whole_s)}, its "
                f"update alone {format_seconds(update_s)}: write workload.optimize, or times of a whole step"
            )
        return whole_s - update_s

    def forward(self, params: Sequence[Buffer]) -> float | NDArray[np.float64]:
        """Return the seconds of a forward pass through the tensors of `params`."""
        return self.forward_s * math.fsum(self._share(buffer) for buffer in params) / self._speed

    def backward(self, grad: Buffer) -> float | NDArray[np.float64]:
        """Return the seconds of the backward pass of the tensors of `grad`."""
        if grad.tensors is None:
            return 0.0
        first, last = grad.tensors
        share = float(self._backward_share_before[last] - self._backward_share_before[first])
        return self.backward_s * share / self._speed

    def tensor_backward_s(self) -> tuple[float, ...]:
        """Return the seconds of the backward pass of every tensor, in forward order."""
        seconds = np.diff(self._backward_share_before) * self.backward_s / self._device.speed
        return tuple(seconds.tolist())

    def _share(self, buffer: Buffer) -> float:
        if buffer.tensors is None:
            return 0.0
        first, last = buffer.tensors
        return float(self._share_before[last] - self._share_before[first])

    def optimize(self, op: Optimize, params: Sequence[Buffer]) -> float | NDArray[np.float64]:
        """Return the seconds of an update: from the workload, or the memory traffic of the optimizer.

        An outer optimizer is SGD with momentum.
        """
        nbytes = sum(buffer.nbytes for buffer in params)
        if self._workload.optimize_s is None or op.optimizer == "outer":
            kind = OPTIMIZERS["sgd" if op.optimizer == "outer" else self._workload.optimizer]
            return kind.n_passes * nbytes / self._device.memory_bandwidth_Bps
        count = sum(buffer.count for buffer in params)
        return self._workload.optimize_s * count / sum(self._workload.tensor_counts) / self._speed

    def copy(self, op: Copy, src: Buffer, dst: Buffer) -> float:
        """Return the seconds of a copy: read and write on the device, or once over the host's bus.

        Only checkpoints are copied to the host, which may take longer than its bus does: see `staging_bandwidth_Bps`.
        """
        if src.place == dst.place == "device":
            read_nbytes = src.nbytes * dst.count / src.count  # a copy to slices reads one of them
            return (read_nbytes + dst.nbytes) / self._device.memory_bandwidth_Bps
        host_Bps = self._device.host_bandwidth_Bps
        if dst.place == "host" and self._device.staging_bandwidth_Bps is not None:
            return src.nbytes / min(host_Bps, self._device.staging_bandwidth_Bps)
        return src.nbytes / host_Bps

    def combine(self, srcs: Sequence[Buffer], dst: Buffer) -> float:
        """Return the seconds of a linear combination: read all sources, write the result."""
        return (sum(src.nbytes for src in srcs) + dst.nbytes) / self._device.memory_bandwidth_Bps

    def fusion_copy(self, parts: Sequence[Buffer], fused: Buffer) -> float:
        """Return the seconds of copying buffers into a fusion buffer, or out of it: read one side, write the other."""
        nbytes = sum(part.nbytes for part in parts) + (fused.count - fused.padding) * ITEM_NBYTES[fused.dtype]
        return nbytes / self._device.memory_bandwidth_Bps

    def trust_ratios(self, op: TrustRatios, params: Sequence[Buffer], world_size: int) -> NDArray[np.float64]:
        """Return the seconds of each rank's share of the tensors, `[world_size]`.

        Every tensor takes an equal part of the workload's seconds, because the launch dominates small kernels. Without
        such seconds, both norms take the time of reading parameters and gradients from memory.
        """
        counts = np.array(self._workload.tensor_counts, dtype=np.float64)
        tensors = np.array(sorted({tensor for buffer in params for tensor in range(*(buffer.tensors or (0, 0)))}))
        share = -(-len(tensors) // op.group.size)
        given_s = self._workload.trust_ratios_s
        weights = 2 * counts * ITEM_NBYTES[params[0].dtype] if given_s is None else np.ones(len(counts))
        weights = np.add.reduceat(weights[tensors], np.arange(0, len(tensors), share))
        of_members = np.zeros(op.group.size)
        of_members[: len(weights)] = (
            weights / self._device.memory_bandwidth_Bps if given_s is None else given_s * (weights / len(counts))
        )
        n_blocks, size, stride = op.group.shape(world_size)
        seconds = np.broadcast_to(of_members[:, None], (n_blocks, size, stride)).reshape(-1)
        return seconds if given_s is None else seconds / self._speed

    def merge(self, src: Buffer, dst: Buffer) -> float:
        """Return the seconds of summing equal indices and keeping the largest: a few passes over short vectors."""
        return (_MERGE_PASSES * src.nbytes + dst.nbytes) / self._device.memory_bandwidth_Bps

    def select(self, op: Select, src: Buffer, residual: Buffer, dst: Buffer) -> float:
        """Return the seconds of a selection: the gradient read, passes over the residual, and the result written.

        If the device states from which size the kernels are faster, an exact selection serves shorter vectors.
        """
        kernels_from = self._device.select_kernels_from
        method = "exact" if kernels_from is not None and residual.count < kernels_from else op.method
        passes = _RESIDUAL_PASSES + _SELECT_PASSES[method]
        return (src.nbytes + passes * residual.nbytes + dst.nbytes) / self._device.memory_bandwidth_Bps

    def low_rank(self, op: LowRank, grad: Buffer) -> float:
        """Return the seconds of a stage: passes over the matrices, a product with factors, an orthonormalization.

        The product takes the longer of its memory traffic and its FLOPs at the fp32 peak. To orthonormalize a column
        takes the seconds that the device states, whatever its length, because the launch dominates small kernels.
        Without such seconds it takes Gram-Schmidt's memory traffic. That is a lower bound, and so is leaving out the
        other launches.
        """
        itemsize = ITEM_NBYTES[grad.dtype]
        device = self._device
        counts = np.array([(each.rows, each.columns, each.rank) for each in op.matrices], dtype=np.float64)
        rows, columns, rank = counts.T
        flops = 2 * float((rows * columns * rank).sum())
        peak = device.peak_flops.at("fp32")
        matrices_nbytes = itemsize * float((rows * columns).sum())
        factors_nbytes = itemsize * float((rank * (rows + columns)).sum())
        passes_s = _LOW_RANK_PASSES[op.stage] * matrices_nbytes / device.memory_bandwidth_Bps
        product_s = (matrices_nbytes + factors_nbytes) / device.memory_bandwidth_Bps
        seconds = passes_s + max(product_s, flops / peak if peak else 0.0)
        if op.stage == "product":
            n_rest = grad.count - grad.padding - float((rows * columns).sum())
            return seconds + 2 * itemsize * n_rest / device.memory_bandwidth_Bps
        if device.orthonormalize_s is not None:
            return seconds + device.orthonormalize_s * float(rank.sum())
        lengths = columns if op.stage == "left" else rows  # column i is read, written, and subtracted from later ones
        traffic = itemsize * float((lengths * (3 * rank + 4 * rank * (rank - 1) / 2)).sum())
        return seconds + traffic / device.memory_bandwidth_Bps

    def densify(self, op: Densify, src: Buffer, dst: Buffer) -> float:
        """Return the seconds of a scatter-add: clear the vector, read the pairs, read and write their places.

        Slices of several ranks are added one after the other. Each pair is read once, and each place is touched once.
        """
        touched_nbytes = 2 * src.count * ITEM_NBYTES[dst.dtype]
        return (dst.nbytes + src.nbytes + touched_nbytes) / self._device.memory_bandwidth_Bps


def interpolated_step_s(measured: Sequence[MeasuredStep], batch_size: int) -> float:
    """Return the seconds of a step: a line between neighbours, continued beyond the last and before the first.

    A line that would reach 0 before an empty batch is none of a GPU. Then, and with one measured step, the time is
    proportional to the batch size.
    """
    after = next((i for i, each in enumerate(measured) if each.batch_size >= batch_size), len(measured) - 1)
    high = measured[after]
    if after == 0 and len(measured) > 1:
        high = measured[1]
    low = measured[max(0, after - 1)]
    n_samples = high.batch_size - low.batch_size
    per_sample_s = (high.time_s - low.time_s) / n_samples if n_samples else high.time_s / high.batch_size
    fixed_s = low.time_s - per_sample_s * low.batch_size
    if fixed_s < 0 and batch_size < low.batch_size:
        return low.time_s * batch_size / low.batch_size
    return fixed_s + per_sample_s * batch_size


def _share_before(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of the first 0, 1, ... weights, as shares of the total."""
    return np.concatenate(([0.0], np.cumsum(weights) / weights.sum()))


def _listed(precisions: Sequence[Precision]) -> str:
    return ", ".join(precisions) or "none"
