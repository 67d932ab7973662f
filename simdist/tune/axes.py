"""What may be varied about a schedule, besides when it averages parameters over whom."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simdist.errors import ScenarioError
from simdist.plan.plan import ITEM_NBYTES
from simdist.scenario import Scenario
from simdist.schedules import kinds
from simdist.schedules.job import POLICIES
from simdist.tune.candidates import Axis, Value

AVERAGING = ("local_sgd", "hierarchical_sgd")
"""Kinds that average parameters."""
_DENSE = ("sync", "torus")
_SERVERS = ("parameter_server",)
_SPARSE = ("hitopk", "gtopk", "naive_ag")
KINDS = (*_DENSE, *AVERAGING, *_SERVERS, *_SPARSE)
"""Kinds that are tuned."""

_MIB = 1024**2
_BUCKETS: tuple[Value, ...] = (_MIB, 4 * _MIB, 10 * _MIB, 25 * _MIB, 50 * _MIB, 100 * _MIB, None)
_SPARSE_BUCKETS: tuple[Value, ...] = (25 * _MIB, None)
_DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
_PREFETCH = (1, 2, 4, 8)
_TIMES_READERS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Extras:
    """Which schedules may be tried.

    Args:
        only: Kinds, of `KINDS`; all that are allowed if empty.
        min_density: Least share of a gradient that may be sent; None: all of it is, so no schedule is sparse.
        allows_fp16: Gradients may be sent in half precision.
        allows_servers: There may be parameter servers.
    """

    only: tuple[str, ...] = ()
    min_density: float | None = None
    allows_fp16: bool = False
    allows_servers: bool = False

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that may be tried.

        Raises:
            ScenarioError: A sparse kind is asked for, but not how sparse it may be.
        """
        sparse = [kind for kind in self.only if kind in _SPARSE]
        if sparse and self.min_density is None:
            raise ScenarioError(
                f"--only {sparse[0]}: it sends a part of the gradient, which changes what is learnt; say how small a "
                f"part it may be, e.g. --min-density 0.001"
            )
        allowed = (*_DENSE, *AVERAGING, *_SERVERS * self.allows_servers, *_SPARSE * (self.min_density is not None))
        return self.only or allowed


def own_axes(kind: str, scenario: Scenario, extras: Extras) -> tuple[Axis, ...]:
    """Return what may be varied about how the schedules of a kind synchronise."""
    return tuple(_of_averaging(kind, scenario) if kind in AVERAGING else _of_gradients(kind, scenario, extras))


def _of_averaging(kind: str, scenario: Scenario) -> Iterator[Axis]:
    if kind == "hierarchical_sgd":
        has_levels = 1 < scenario.cluster.gpus_per_node < scenario.cluster.world_size
        yield Axis("intra_node_gradients", (False, True) if has_levels else (False,), False)


def _of_gradients(kind: str, scenario: Scenario, extras: Extras) -> Iterator[Axis]:
    workload, cluster = scenario.workload, scenario.cluster
    whole_nbytes = sum(workload.tensor_counts) * ITEM_NBYTES[workload.dtype]
    ladder = _SPARSE_BUCKETS if kind in _SPARSE else _BUCKETS
    sizes = [each for each in ladder if not isinstance(each, int) or each < whole_nbytes]
    yield _axis(kind, "bucket_nbytes", sizes)
    if extras.allows_fp16 and workload.dtype == "float32":
        yield _axis(kind, "compression", ("none", "fp16"))
    if kind in _SERVERS:
        yield _axis(kind, "servers", sorted({1, cluster.nodes, cluster.world_size}))
    if kind in _SPARSE and extras.min_density is not None:
        least = extras.min_density
        yield _axis(kind, "density", (least, *(density for density in _DENSITIES if density > least)))


def _axis(kind: str, name: str, values: Sequence[Value]) -> Axis:
    return Axis(name, tuple(values), kinds()[kind].model_fields[name].default)


def input_axes(scenario: Scenario) -> tuple[Axis, ...]:
    """Return what may be varied about how batches are read, if they are read from storage."""
    path = scenario.input
    if path.source != "storage":
        return ()
    prefetch = Axis("prefetch", tuple(sorted({*_PREFETCH, path.prefetch})), path.prefetch)
    if scenario.data is None:
        return (prefetch,)
    readers = Axis("readers", tuple(times * path.readers for times in _TIMES_READERS), path.readers)
    return (prefetch, Axis("data", POLICIES, scenario.data.policy), readers)
