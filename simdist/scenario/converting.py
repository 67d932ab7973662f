"""Convert files of releases before 0.2, whose clusters and inputs had no groups.

Keys move in the text, so that comments, order and spelling stay. A comment inside braces that span several lines is
lost if its key moves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from simdist.errors import ScenarioError
from simdist.scenario import strict_yaml
from simdist.scenario.cluster import Cluster, Disk, Storage
from simdist.scenario.disturbances import Interference
from simdist.scenario.fields import parse_path
from simdist.scenario.loading import read_text
from simdist.scenario.scenario import Scenario
from simdist.scenario.strict_yaml import dump_line
from simdist.scenario.workload import Workload
from simdist.schedules.base import Schedule

_INDENT = "  "
_MOST_COLUMNS = 100  # of a line with braces
_MOST_MOVES = 100_000  # of a file


@dataclass(frozen=True, slots=True)
class _Move:
    """A key that moves: a mapping, its key, the group below the mapping (empty: it stays there), and the new key."""

    mapping: yaml.MappingNode
    key: str
    group: str
    new_key: str


def convert(text: str, *, name: str = "<text>") -> str:
    r"""Return a scenario, a sweep, a cluster or a JSON file of them with the keys of this release.

    Args:
        text: YAML. A file without old keys is returned as it is.
        name: Of the file, for messages.

    Raises:
        ScenarioError: It is no YAML.

    >>> print(convert("nodes: 2  # machines\nlibrary: gloo  # CPUs\nchunkwise: true"), end="")
    nodes: 2  # machines
    collectives:
      library: gloo  # CPUs
      chunkwise: true
    """
    for _ in range(_MOST_MOVES):
        root = _composed(text, name)
        move = next(_moves(root), None) if root is not None else None
        if move is None:
            return _with_new_paths(text, root)
        text = _moved(text, move)
    raise ScenarioError(f"{name}: more than {_MOST_MOVES} keys to move")


def is_of_simdist(path: Path) -> bool:
    """Tell whether a file is a scenario, a sweep or a cluster, of this release or an earlier one."""
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    document = strict_yaml.parse(read_text(path))
    keys = document.root.keys() if isinstance(document.root, dict) else set()
    return bool(keys & {"cluster", "scenario"} or keys >= {"nodes", "gpus_per_node"})


def _composed(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise ScenarioError(f"{name}:{line}: is not YAML: {str(error).splitlines()[0]}") from None


def _moves(root: yaml.Node) -> Iterator[_Move]:
    """Yield the keys that move, from top to bottom."""
    for path, mapping in _mappings(root, ()):
        keys = [key.value for key, _ in mapping.value]
        for key in keys:
            new = _moves_of(path, keys).get(key)
            if new is not None:
                group, _, new_key = new.rpartition(".")
                yield _Move(mapping, key, group, new_key)


def _moves_of(path: tuple[str, ...], keys: list[str]) -> dict[str, str]:
    """Return the keys that move of a mapping, by what it is: its path without indices, and its keys."""
    if path[-1:] == ("cluster",) or (not path and {"nodes", "gpus_per_node"} & {*keys} and "cluster" not in keys):
        return dict(Cluster.moved)
    if path[-1:] == ("storage",) and ("bandwidth" in keys or "cluster" in path):
        return dict(Storage.moved)
    if path[-1:] == ("disk",) and ("read" in keys or "cluster" in path):
        return dict(Disk.moved)
    if path[-1:] == ("workload",) or (not path and "batch_size" in keys):
        return dict(Workload.moved)
    if "kind" in keys:
        is_disturbance = path[-1:] == ("disturbances",)
        return dict(Interference.moved) if is_disturbance else dict(Schedule.moved)
    if "cluster" in keys and path in ((), ("scenario",)):
        return dict(Scenario.moved)
    return {}


def _mappings(node: yaml.Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], yaml.MappingNode]]:
    """Yield all mappings, with the keys that lead to them."""
    if isinstance(node, yaml.MappingNode):
        yield path, node
        for key, value in node.value:
            yield from _mappings(value, (*path, *str(key.value).split(".")))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _mappings(item, path)


def _moved(text: str, move: _Move) -> str:
    """Return a text in which one key has moved."""
    pairs = move.mapping.value
    at = next(i for i, (key, _) in enumerate(pairs) if key.value == move.key)
    key, _ = pairs[at]
    if not move.group:
        return _spliced(text, key.start_mark.index, key.end_mark.index, _quoted(key, move.new_key))
    group = next((value for other, value in pairs if other.value == move.group), None)
    if isinstance(group, yaml.ScalarNode):  # null
        raise ScenarioError(f"{move.group} is {group.value!r}, and {move.key} moves there: remove {move.group}")
    entry = _entry(text, move.mapping, at, move.new_key)
    if move.mapping.flow_style:
        return _moved_in_braces(text, move, at, entry, group)
    lines = text.splitlines(keepends=True)
    first, last = _lines_of(lines, move.mapping, at)
    start = _start(move.mapping)
    column = start.column
    if group is None:
        inside = "".join(_INDENT + line if line.strip() else line for line in entry)
        added = _indented([f"{move.group}:\n", *inside.splitlines(keepends=True)], column)
        if first == start.line:  # the line may begin with the dash of a list
            added[0] = lines[first][:column] + added[0][column:]
        return "".join([*lines[:first], *added, *lines[last:]])
    without = ["" for _ in lines[first:last]]
    if first == start.line and lines[first][:column].strip():
        raise ScenarioError(f"line {first + 1}: {move.key} begins an item of a list: write it after {move.group}")
    kept = [*lines[:first], *without, *lines[last:]]
    return _with_entry(kept, group, entry, column)


def _with_entry(lines: list[str], group: yaml.MappingNode, entry: list[str], column: int) -> str:
    """Return lines in which a group that is there has one more entry."""
    if not group.flow_style:
        end = _end_line(group, lines)
        added = _indented(entry, _start(group).column)
        if not lines[end - 1].endswith("\n"):
            lines[end - 1] += "\n"
        return "".join([*lines[:end], *added, *lines[end:]])
    line = group.start_mark.line
    is_short = line == group.end_mark.line and len(entry) == 1 and "#" not in entry[0]
    if is_short:
        end = group.end_mark.column - 1
        comma = ", " if group.value else ""
        longer = lines[line][:end].rstrip() + comma + entry[0].strip() + lines[line][end:]
        if len(longer) <= _MOST_COLUMNS:
            return "".join([*lines[:line], longer, *lines[line + 1 :]])
    head = lines[line][: group.start_mark.column].rstrip()
    rest = lines[group.end_mark.line][group.end_mark.column :].rstrip("\n")
    items = [f"{key.value}: {_on_one_line(lines, value)}\n" for key, value in group.value]
    added = _indented([*items, *entry], column + len(_INDENT))
    return "".join([*lines[:line], f"{head}{rest}\n", *added, *lines[group.end_mark.line + 1 :]])


def _moved_in_braces(text: str, move: _Move, at: int, entry: list[str], group: yaml.Node | None) -> str:
    """Return a text in which a key of a mapping in braces has moved to a group of it."""
    pairs = move.mapping.value
    key, value = pairs[at]
    item = " ".join(line.strip() for line in entry)
    if group is None:
        name = _quoted(key, move.group)
        return _spliced(text, key.start_mark.index, value.end_mark.index, f"{name}: {{{item}}}")
    start = key.start_mark.index
    end = value.end_mark.index
    if at:
        start = pairs[at - 1][1].end_mark.index
    else:
        end = pairs[1][0].start_mark.index
    inside = group.end_mark.index - 1
    comma = ", " if isinstance(group, yaml.MappingNode) and group.value else ""
    edits = sorted([(start, end, ""), (inside, inside, comma + item)], reverse=True)
    for first, last, replacement in edits:
        text = _spliced(text, first, last, replacement)
    return text


def _entry(text: str, mapping: yaml.MappingNode, at: int, new_key: str) -> list[str]:
    """Return the lines of an entry as they stand at the margin, under its new key."""
    key, value = mapping.value[at]
    if mapping.flow_style:
        rest = text[key.end_mark.index : value.end_mark.index]
        return [_quoted(key, new_key) + rest]
    lines = text.splitlines(keepends=True)
    first, last = _lines_of(lines, mapping, at)
    column = _start(mapping).column
    at_key = key.start_mark.line - first
    found = [line[column:] if line[:column].strip() in ("", "-") else line.lstrip() for line in lines[first:last]]
    if not found[-1].endswith("\n"):
        found[-1] += "\n"
    found[at_key] = _quoted(key, new_key) + found[at_key][key.end_mark.column - column :]
    return found


def _lines_of(lines: list[str], mapping: yaml.MappingNode, at: int) -> tuple[int, int]:
    """Return the first line of an entry in block style, with the comments above it, and the line after its last."""
    key, value = mapping.value[at]
    first = key.start_mark.line
    column = key.start_mark.column
    while at and first and lines[first - 1].lstrip().startswith("#") and lines[first - 1].index("#") == column:
        first -= 1
    return first, max(key.start_mark.line + 1, _end_line(value, lines))


def _start(mapping: yaml.MappingNode) -> yaml.Mark:
    """Return where the first key of a mapping in block style begins, behind an anchor."""
    mark: yaml.Mark = mapping.value[0][0].start_mark
    return mark


def _on_one_line(lines: list[str], value: yaml.Node) -> str:
    """Return a value in braces on one line."""
    first = value.start_mark
    last = value.end_mark
    found = lines[first.line : last.line + 1]
    found[-1] = found[-1][: last.column]
    found[0] = found[0][first.column :]
    if any(line.rstrip("\n").endswith("\\") for line in found):  # a line break within quotes
        return dump_line(yaml.SafeLoader("").construct_object(value, deep=True))
    return " ".join(line.strip() for line in found)


def _end_line(node: yaml.Node, lines: list[str]) -> int:
    """Return the line after the last one of a value."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _end_line(node.value[-1][1], lines)
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _end_line(node.value[-1], lines)
    end = node.end_mark
    return end.line if end.column == 0 and end.line > node.start_mark.line else min(end.line + 1, len(lines))


def _indented(lines: list[str], column: int) -> list[str]:
    return [" " * column + line if line.strip() else line for line in lines]


def _quoted(key: yaml.Node, name: str) -> str:
    """Return a key as it stands beside another one, in quotes in JSON."""
    return f'"{name}"' if getattr(key, "style", None) == '"' else name


def _spliced(text: str, start: int, end: int, replacement: str) -> str:
    return text[:start] + replacement + text[end:]


def _with_new_paths(text: str, root: yaml.Node | None) -> str:
    """Return a text whose keys and values that are paths of fields have the new paths."""
    scalars = [] if root is None else sorted(_scalars(root, False), key=lambda each: -each[0].start_mark.index)
    for scalar, is_of_cluster in scalars:
        path = new_path_of(scalar.value, is_of_cluster=is_of_cluster)
        if path != scalar.value:
            old = text[scalar.start_mark.index : scalar.end_mark.index]
            text = _spliced(text, scalar.start_mark.index, scalar.end_mark.index, old.replace(scalar.value, path))
    return text


def _scalars(node: yaml.Node, is_of_cluster: bool) -> Iterator[tuple[yaml.ScalarNode, bool]]:
    """Yield keys and values that may be paths, and whether they are paths within a cluster."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield key, is_of_cluster
            ranges = key.value == "uncertain" and "cluster" not in {other.value for other, _ in node.value}
            yield from _scalars(value, ranges)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item, is_of_cluster)
    elif isinstance(node, yaml.ScalarNode):
        yield node, False


def new_path_of(path: str, *, is_of_cluster: bool = False) -> str:
    """Return the path of a field in this release; others are returned as they are.

    Args:
        path: As in sweeps and `uncertain`.
        is_of_cluster: Whether it is a path within a cluster.

    >>> new_path_of("cluster.nics_per_node"), new_path_of("schedules[1].data"), new_path_of("collective_overhead")
    ('cluster.topology.nics_per_node', 'schedules[1].input.policy', 'collective_overhead')
    """
    try:
        parts = parse_path(path)
    except ValueError:
        return path
    match parts:
        case ("cluster", "storage" | "disk", key, *_) if key in Storage.moved:
            return path.replace(f".{key}", f".{Storage.moved[str(key)]}", 1)
        case ("workload", key, *_) if key in Workload.moved:
            return path.replace(f"workload.{key}", f"workload.{Workload.moved[str(key)]}", 1)
        case ("cluster", key, *_) if key in Cluster.moved:
            return path.replace(f"cluster.{key}", f"cluster.{Cluster.moved[str(key)]}", 1)
        case (key, *_) if is_of_cluster and key in Cluster.moved:
            return path.replace(str(key), Cluster.moved[str(key)], 1)
        case ("data", _, *_):
            return f"input.{path}"
        case ("schedules", int(), key, *_) if key in Schedule.moved:
            return path.replace(f".{key}", f".{Schedule.moved[str(key)]}", 1)
        case ("disturbances", int(), key, *_) if key in Interference.moved:
            return path.replace(f".{key}", f".{Interference.moved[str(key)]}", 1)
        case _:
            return path
