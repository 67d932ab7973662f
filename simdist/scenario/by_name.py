"""Files of scenarios, clusters and workloads, by path or by the name of a preset."""

from pathlib import Path

from simdist.errors import ScenarioError
from simdist.scenario import Cluster, load_cluster, presets
from simdist.settings.base import nearest


def find_file(kind: presets.PresetKind, name: str, *, option: str = "", hint: str = "") -> Path:
    """Return a file or, if there is none, that of the preset of that name.

    Args:
        kind: Of the preset.
        name: Of the file or preset.
        option: That it was given to, if to one.
        hint: Beginning of errors, if the option takes something else, too.

    Raises:
        ScenarioError: There is neither.
    """
    path = Path(name)
    known = presets.names(kind)
    if path.exists() and not path.is_dir():
        return path
    if name in known:
        return presets.path(kind, name)
    problem = "is a directory, no file" if path.is_dir() else "there is no such file"
    where = f"{option} {name}".lstrip()
    raise ScenarioError(f"{where}: {hint}{problem}, nor a preset of that name: {nearest(name, known)}")


def read_cluster(name: str, *, option: str = "--cluster", hint: str = "") -> Cluster:
    """Read a cluster from a file or, if there is none, the preset of that name.

    Args:
        name: Of the file or preset.
        option: That it was given to.
        hint: Beginning of errors, if the option takes something else, too.

    Raises:
        ScenarioError: There is neither, or it is wrong.
    """
    return load_cluster(find_file("clusters", name, option=option, hint=hint))
