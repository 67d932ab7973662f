"""Settings that have no effect in a scenario, and one whose absence has."""

import math
from collections.abc import Iterable, Iterator

from simdist.scenario.cluster import Cluster, Disk
from simdist.scenario.data import DataSettings, Lognormal
from simdist.scenario.disturbances import Pauses, Recorded, first_step, never_delays
from simdist.scenario.links import LinkDisturbance, never_slows
from simdist.scenario.probable_units import doubtful_units
from simdist.scenario.scenario import Host, Scenario
from simdist.schedules import GradientSchedule, Schedule
from simdist.schedules.job import Job, Policy, uses_disk, uses_memory
from simdist.settings.units import format_nbytes, format_seconds

_SEEK_S = 1e-3  # heads that move take longer, flash is faster: 4.16 ms and 70 us (Seagate Exos X18, Samsung PM9A3)
_MOST_NICS = 4  # of a GPU: AWS p5 has 32 for 8
_UNSTATED = (
    "cluster.network.efficiency is not stated, and so 1; 0.38 (TCP, nccl#398) to 0.96 (RDMA, nccl-tests#119) were "
    "measured: write it, or a range in cluster.uncertain"
)

_UNSTATED_FACTORS = (
    "cluster.device.orthonormalize is not stated, so powersgd makes factors orthonormal in no more time than their "
    "memory traffic takes, which is too little on a GPU: measure it, with python -m real.calibrate"
)


def warnings_of(scenario: Scenario) -> tuple[str, ...]:
    """Return the doubts of a scenario, values of doubtful units, and settings without effect, a sentence each."""
    return (*scenario.doubts, *doubtful_units(scenario), *_recordings(scenario), *_unused_settings(scenario))


def _recordings(scenario: Scenario) -> Iterator[str]:
    """Yield a sentence for each recording of another number of ranks, or with a row for each micro-batch."""
    for i, disturbance in enumerate(scenario.delays):
        sentences = [disturbance.ranks_remark(scenario.cluster.world_size)] if disturbance else []
        if isinstance(disturbance, Recorded):
            sentences.append(disturbance.rows_remark(scenario.steps, scenario.workload.micro_batches))
        yield from (f"disturbances[{i}]: {sentence}" for sentence in sentences if sentence)


def unstated(cluster: Cluster, schedules: Iterable[Schedule]) -> list[str]:
    """Say what is taken to be as fast as can be because nobody has stated it: a link between nodes, Gram-Schmidt."""
    network = cluster.network
    is_stated = "efficiency" in network.model_fields_set or math.isinf(network.bandwidth_Bps)
    found = [] if is_stated or cluster.n_domains == 1 else [_UNSTATED]
    if cluster.device.orthonormalize_s is None and any(each.orthonormalizes for each in schedules):
        found.append(_UNSTATED_FACTORS)
    return found


def _unused_settings(scenario: Scenario) -> Iterator[str]:
    """Yield a sentence for each setting that has no effect."""
    cluster = scenario.cluster
    workload = scenario.workload
    source = scenario.input.source
    if scenario.host.waits_for == "update" and scenario.host.run_ahead_steps is None:
        yield "host.waits_for has no effect: with host.run_ahead_steps null the host never waits"
    if source == "device" and scenario.input.copy_method != "pinned":
        yield "input.copy has no effect: with input.source device nothing is copied"
    if source != "storage" and scenario.input.prefetch != 2:
        yield f"input.prefetch has no effect: with input.source {source} nothing is read ahead"
    yield from _unused_data_settings(scenario)
    saves_to = scenario.checkpoint.to if scenario.checkpoint else None
    every = scenario.checkpoint.every if scenario.checkpoint else 0
    if isinstance(every, int) and every > scenario.steps:
        yield f"checkpoint has no effect: none is due within {scenario.steps} steps"
    if source != "storage" and saves_to != "storage" and "storage" in cluster.model_fields_set and cluster.storage:
        yield f"cluster.storage has no effect: with input.source {source} nothing reads from it"
    if cluster.storage and cluster.storage.servers > cluster.nodes:
        counts = f"{cluster.storage.servers} for {cluster.nodes} nodes"
        yield f"cluster.storage.servers: {counts}: each uses one, others idle"
    ahead = scenario.host.run_ahead_steps
    if ahead is not None and ahead >= scenario.steps:
        yield f"host.run_ahead_steps has no effect: with {scenario.steps} steps the host never waits"
    shape = (cluster.world_size, cluster.gpus_per_node, scenario.steps)
    speeds = cluster.device_speed().tolist()
    job = Job(
        *shape,
        tensor_counts=workload.tensor_counts,
        tensor_rows=workload.tensor_rows,
        speeds=tuple(speeds),
        units=workload.sharded_units,
    )
    for i, schedule in enumerate(scenario.schedules):
        for sentence in (*schedule.unused_settings(*shape), *schedule.unused_in(job)):
            yield f"schedules[{i}] ({schedule.name}) {sentence}"
        is_nccl = cluster.library != "gloo" and cluster.device.compute_capability is not None
        if is_nccl and schedule.algorithm == "tree":
            yield f"schedules[{i}].algorithm tree sends whole buffers along one tree: NCCL's Tree is double_tree"
        if isinstance(schedule, GradientSchedule) and schedule.compression == "fp16" and workload.dtype != "float32":
            yield f"schedules[{i}].compression has no effect: gradients are of type {workload.dtype} already"
    if workload.optimizer == "sgd" and workload.trust_ratios_s is not None:
        yield "workload.trust_ratios has no effect: with workload.optimizer sgd there are none"
    if cluster.oversubscription != 1 and not _uses_nics(scenario):
        yield f"cluster.oversubscription has no effect: {_one_domain(cluster)} sends nothing through a switch"
    if cluster.rails and (cluster.gpus_per_node == 1 or not _uses_nics(scenario)):
        yield "cluster.rails has no effect: the GPUs of a node share no NICs"
    if cluster.leaf and cluster.nodes <= cluster.leaf.nodes:
        yield f"cluster.leaf has no effect: {cluster.nodes} nodes are below one leaf of {cluster.leaf.nodes}"
    if cluster.in_switch_reduction and (cluster.library == "gloo" or (cluster.device.compute_capability or 0) < 9):
        yield "cluster.in_switch_reduction has no effect: it is NCCL's with device.compute_capability 9.0 or more"
    ranges = {*cluster.uncertain, *(path.removeprefix("cluster.") for path in scenario.uncertain)}
    if "fabric.latency" in ranges and cluster.library != "gloo" and cluster.device.compute_capability is not None:
        yield "the range of cluster.fabric.latency has no effect on NCCL's rings and trees: they have NCCL's own hops"
    if cluster.nics_per_node > _MOST_NICS * cluster.gpus_per_node:
        per_gpu = cluster.nics_per_node / cluster.gpus_per_node
        yield f"cluster.nics_per_node gives a GPU {per_gpu:g} NICs, more than its PCIe carries: state those that it has"
    if cluster.host and cluster.library != "gloo":
        yield f"cluster.host is what gloo takes of CPU cores, and is charged though library is {cluster.library}"
    if cluster.chunkwise and cluster.library != "gloo":
        yield f"cluster.chunkwise has no effect: it models rings of gloo only, and library is {cluster.library}"
    if workload.has_seconds:
        times = "workload.step_times" if workload.step_times else "workload.forward"
        for key, stated in (("utilization", workload.utilization.stated), ("precision", workload.precision != "fp32")):
            if stated and key in workload.model_fields_set:
                yield f"workload.{key} has no effect: {times} states the time"
    for i, disturbance in enumerate(scenario.disturbances):
        if disturbance.on == "io" and source != "storage":
            yield f"disturbances[{i}] has no effect: it is on io, and with input.source {source} nothing is loaded"
        if isinstance(disturbance, LinkDisturbance):
            yield from _unused_link(i, disturbance, scenario)
        elif never_delays(disturbance):
            yield f"disturbances[{i}] has no effect: it never delays"
        elif (begin := first_step(disturbance)) >= scenario.steps:
            yield f"disturbances[{i}] has no effect: it begins in step {begin} of {scenario.steps}, counted from 0"
        elif isinstance(disturbance, Pauses) and disturbance.covered_s[1] > 0 and _hides_pauses(scenario.host):
            yield (
                f"disturbances[{i}].covered hides a part of pauses, and so does a host that is ahead of its device: "
                f"leave covered out, or write host.waits_for: loss and host.run_ahead_steps: 0"
            )
    if scenario.seed and not scenario.is_random:
        yield "seed has no effect: nothing is random"


def _hides_pauses(host: Host) -> bool:
    """Tell whether the device still has work in the plan when its host is late."""
    return host.waits_for == "update" or host.run_ahead_steps != 0


def _unused_link(number: int, disturbance: LinkDisturbance, scenario: Scenario) -> Iterator[str]:
    if never_slows(disturbance):
        yield f"disturbances[{number}] has no effect: it leaves its links as they are"
    if disturbance.link == "storage" and not _uses_storage(scenario):
        yield f"disturbances[{number}] has no effect: with input.source {scenario.input.source} nothing is read"
    if disturbance.link.startswith("nic") and not _uses_nics(scenario):
        yield f"disturbances[{number}] has no effect: {_one_domain(scenario.cluster)} sends nothing over its NICs"


def _uses_storage(scenario: Scenario) -> bool:
    is_saved = scenario.checkpoint is not None and scenario.checkpoint.to == "storage"
    return scenario.input.source == "storage" or is_saved


def _uses_nics(scenario: Scenario) -> bool:
    """Tell whether something may leave a node other than by the fabric."""
    servers_apart = any(each.model_dump().get("apart") for each in scenario.schedules)
    return scenario.cluster.n_domains > 1 or servers_apart or _uses_storage(scenario)


def _one_domain(cluster: Cluster) -> str:
    return "one node" if cluster.nodes == 1 else f"one domain of {cluster.nodes} nodes"


def _unused_data_settings(scenario: Scenario) -> Iterator[str]:
    """Yield a sentence for each setting of a data set, and of what it is read from."""
    source = scenario.input.source
    if source != "storage":
        yield from (f"{key} has no effect: with input.source {source} nothing is read" for key in _overrides(scenario))
    if scenario.data is None:
        yield from (f"{key} has no effect: without data a batch is one request" for key in _of_data_sets(scenario))
    elif source != "storage":
        yield f"data has no effect: with input.source {source} nothing is read"
    else:
        yield from _unused_beside_data(scenario, scenario.data)


def _overrides(scenario: Scenario) -> Iterator[str]:
    for i, schedule in enumerate(scenario.schedules):
        for key in ("data", "prefetch", "readers", "decode_workers"):
            if key in schedule.model_fields_set:
                yield f"schedules[{i}].{key}"


def _of_data_sets(scenario: Scenario) -> Iterator[str]:
    """Yield the keys that are written and that only reading a data set would heed."""
    cluster = scenario.cluster
    workload = scenario.workload
    storage = scenario.cluster.storage
    if scenario.input.readers != 8:
        yield "input.readers"
    if scenario.input.decode_workers != 1:
        yield "input.decode_workers"
    if not (scenario.checkpoint and scenario.checkpoint.to == "disk") and "disk" in cluster.model_fields_set:
        yield "cluster.disk"
    unused = ("memory",) if cluster.host else ("memory", "cores_per_node")
    yield from (f"cluster.{key}" for key in unused if key in cluster.model_fields_set)
    if workload.decode_s and "decode_s" in workload.model_fields_set:
        yield "workload.decode"
    if storage and scenario.input.source == "storage" and "storage" in cluster.model_fields_set:
        keys = {"open_s": "open", "operations_per_s": "operations", "request_nbytes": "request_size"}
        keys |= {"client_requests": "client_requests", "batch_s": "batch"}
        yield from (f"cluster.storage.{key}" for name, key in keys.items() if name in storage.model_fields_set)


def _unused_beside_data(scenario: Scenario, data: DataSettings) -> Iterator[str]:
    cluster = scenario.cluster
    policies: set[Policy] = {schedule.data or data.policy for schedule in scenario.schedules}
    keep = f"{_who_keeps(policies)} no"
    use_disk = any(map(uses_disk, policies))
    use_memory = any(map(uses_memory, policies))
    saves_there = scenario.checkpoint is not None and scenario.checkpoint.to == "disk"
    if "policy" in data.model_fields_set and all(schedule.data for schedule in scenario.schedules):
        yield "data.policy has no effect: every schedule has its own"
    if "disk" in cluster.model_fields_set and cluster.disk and not use_disk and not saves_there:
        yield f"cluster.disk has no effect: {keep} files"
    if "memory" in cluster.model_fields_set and cluster.memory and not use_memory:
        yield f"cluster.memory has no effect: {keep} samples"
    if cluster.disk and use_disk:
        yield from _unlimited_seeks(cluster.disk)
        yield from _too_small("disk", cluster.disk.capacity_nbytes, "file", data.least_nbytes)
    if cluster.memory and use_memory:
        yield from _too_small("memory", cluster.memory.capacity_nbytes, "sample", scenario.workload.sample_nbytes)
    if data.start == "warm" and not use_disk:
        yield f"data.start has no effect: {keep} files"
    if data.eviction != "none" and not _may_fill(cluster, policies):
        staged = "staged" in policies and cluster.disk is not None and cluster.disk.capacity_nbytes is not None
        which = "what is staged in stays, and nothing else" if staged else "nothing"
        yield f"data.eviction has no effect: {which} that is kept has a capacity"
    if data.seed and data.shuffle == "none" and not isinstance(data.file_nbytes, Lognormal):
        yield "data.seed has no effect: nothing of the data set is random"
    if "cores_per_node" in cluster.model_fields_set and not scenario.workload.decode_s and not cluster.host:
        yield "cluster.cores_per_node has no effect: workload.decode is 0"


def _unlimited_seeks(disk: Disk) -> Iterator[str]:
    if disk.latency_s >= _SEEK_S and math.isinf(disk.operations_per_s):
        latency = format_seconds(disk.latency_s)
        yield (
            f"cluster.disk.latency of {latency} is that of a hard disk, which does {1 / disk.latency_s:.4g} files per "
            f"second, and operations are unlimited: write operations: {1 / disk.latency_s:.4g}"
        )


def _who_keeps(policies: set[Policy]) -> str:
    names = ", ".join(sorted(policies))
    return f"the policy {names} keeps" if len(policies) == 1 else f"the policies {names} keep"


def _too_small(level: str, capacity_nbytes: int | None, what: str, least_nbytes: int) -> Iterator[str]:
    if capacity_nbytes is not None and capacity_nbytes < least_nbytes:
        yield f"cluster.{level} has no effect: its capacity of {format_nbytes(capacity_nbytes)} holds no {what}"


def _may_fill(cluster: Cluster, policies: set[Policy]) -> bool:
    disk = cluster.disk is not None and cluster.disk.capacity_nbytes is not None
    memory = cluster.memory is not None and cluster.memory.capacity_nbytes is not None
    return (disk and bool(policies & {"files", "datacache"})) or (memory and any(map(uses_memory, policies)))
