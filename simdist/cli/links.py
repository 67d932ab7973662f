"""Other links for a job: those of a cluster file, as `simdist calibrate` writes it, or of a preset."""

from pathlib import Path

from simdist.errors import ScenarioError
from simdist.scenario import Cluster, Scenario, load_cluster, presets
from simdist.settings.base import nearest

_OF_LINKS = (
    *("name", "source", "fabric", "network", "nics_per_node", "host_bridge_Bps", "oversubscription"),
    *("collective_overhead_s", "library"),
)


def read_cluster(name: str, *, option: str = "--cluster", hint: str = "") -> Cluster:
    """Read a cluster from a file or, if there is none, the preset of that name.

    Args:
        name: Of the file or preset.
        option: That it was given to.
        hint: What an error says first, if the option takes something else, too.

    Raises:
        ScenarioError: There is neither, or it is wrong.
    """
    path = Path(name)
    if path.is_file():
        return load_cluster(path)
    known = presets.names("clusters")
    if name not in known:
        raise ScenarioError(f"{option} {name}: {hint}there is no such file, nor a preset: {nearest(name, known)}")
    return load_cluster(presets.path("clusters", name))


def with_links(scenario: Scenario, name: str) -> Scenario:
    """Return a scenario whose ranks communicate over the links of another cluster; all else is its own.

    Args:
        scenario: What is simulated.
        name: See `read_cluster`. A file must have as many nodes and GPUs: links were measured between those. Of a
            preset they do not count.

    Raises:
        ScenarioError: As `read_cluster`; or a file has other numbers of machines.
    """
    theirs, ours = read_cluster(name), scenario.cluster
    if Path(name).is_file() and (theirs.nodes, theirs.gpus_per_node) != (ours.nodes, ours.gpus_per_node):
        raise ScenarioError(
            f"--cluster {name}: has {theirs.nodes} nodes x {theirs.gpus_per_node} GPUs, {scenario.name} has "
            f"{ours.nodes} x {ours.gpus_per_node}: write as many, or calibrate the machines of this job"
        )
    links = {key: value for key, value in theirs if key in _OF_LINKS}
    return scenario.changed(cluster=ours.model_copy(update=links))
