"""The clusters, workloads, failures and scenarios that ship with simdist, as files in the folder `presets`."""

import functools
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from simdist.errors import ScenarioError
from simdist.scenario.loading import Part, read_part
from simdist.scenario.strict_yaml import BASES, RIVALS
from simdist.scenario.workload import TIMES, unmeasured
from simdist.settings.base import Settings, SettingsGroup, key_of, nearest, refuse, shown, stated

PresetKind: TypeAlias = Literal["clusters", "workloads", "failures", "scenarios"]

_KINDS: dict[Part, PresetKind] = {"cluster": "clusters", "workload": "workloads", "failures": "failures"}


def names(kind: PresetKind) -> list[str]:
    """Return the names of all presets of a kind, in alphabetical order."""
    return sorted(file.stem for file in _folder(kind).glob("*.yaml"))


def path(kind: PresetKind, name: str) -> Path:
    """Return the file of a preset.

    Raises:
        ScenarioError: There is none of that name.
    """
    if name not in names(kind):
        raise ScenarioError(f"unknown preset {shown(name)} of {kind}: {nearest(name, names(kind))}")
    return _folder(kind) / f"{name}.yaml"


@functools.cache
def _read(part: Part, kind: PresetKind, name: str) -> dict[str, object]:
    """Return the keys and values of a preset, which stays as it is; sweeps need the same ones thousands of times."""
    return read_part(part, path(kind, name))


def expand(part: Part, value: object, *, folder: Path = Path()) -> object:
    """Replace a preset's name, or `preset: NAME` or `file: NAME` with keys that override it, by what it stands for.

    In files that simdist wrote, `base` has the keys themselves: see `with_base`.

    Args:
        part: Part of a scenario that the value is.
        value: As it stands in a file.
        folder: A file is relative to it.

    >>> tree = expand("cluster", {"preset": "ideal", "nodes": 3})
    >>> isinstance(tree, dict) and tree["nodes"]
    3
    """
    kind = _KINDS[part]
    if isinstance(value, str):
        if value not in names(kind):
            raise ValueError(_unknown(kind, value))
        return dict(_read(part, kind, value))
    given = [key for key in BASES if isinstance(value, dict) and key in value]
    if not isinstance(value, dict) or not given:
        return value
    overrides = {key: item for key, item in value.items() if key not in BASES}
    if len(given) > 1:
        first, second, *_ = given
        refuse(first, [((first,), f"{first!r} beside {second!r}: write one of them")])
    if "base" in value:
        base = value["base"]
        return _merged(base, overrides) if isinstance(base, dict) else value
    if "file" in value:
        base = _read_file(part, value["file"], folder)
        if part == "workload":
            _refuse_other_batch(base, overrides)
            _refuse_other_model(base, overrides, "file")
        return _merged(base, overrides)
    name = value["preset"]
    if not isinstance(name, str) or name not in names(kind):
        refuse("preset", [(("preset",), _unknown(kind, name))])
    base = _read(part, kind, name)
    if part == "workload":
        _refuse_other_model(base, overrides, "preset")
    return _merged(base, overrides)


def with_base(settings: Settings, in_file: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a scenario as a file has it: the keys that the user wrote, and a `base` with the others."""
    own, base = _apart(settings, in_file)
    moved = {"uncertain", *(rival for key in own for rival in RIVALS.get(key, ()))}  # which `expand` would drop
    own |= {key: base.pop(key) for key in [*base] if key in moved}
    return {"base": base, **own} if base else own


def _apart(settings: Settings, in_file: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys that the user wrote, and those that a preset or a file states."""
    own: dict[str, Any] = {}
    base: dict[str, Any] = {}
    written = stated(settings, in_file)
    for name, value in settings:
        key = type(settings).model_fields[name].alias or name
        if key in written and isinstance(value, SettingsGroup):
            of_own, of_base = _apart(value, in_file[key])
            own |= {key: of_own} if of_own else {}
            base |= {key: of_base} if of_base else {}
        elif key in written:
            (own if name in settings.model_fields_set else base)[key] = written[key]
    return own, base


def _refuse_other_batch(base: dict[str, object], overrides: dict[str, object]) -> None:
    """Refuse another batch size over a file that states seconds, but not the batch size that they were measured at."""
    stated = base.get("batch_size")
    size = overrides.get("batch_size", stated)
    tensors = base.get("tensors")
    is_timed = "forward" in base or (isinstance(tensors, list) and any("forward" in each for each in tensors))
    if is_timed and size != stated and "measured_batch_size" not in base and TIMES.isdisjoint(overrides):
        refuse("file", [(("batch_size",), unmeasured(size, stated))])


def _refuse_other_model(base: dict[str, object], overrides: dict[str, object], key: str) -> None:
    """Refuse another model over a base that states `recompute`, which belongs to the model of the base."""
    share = base.get("recompute")
    if not share or "recompute" in overrides:
        return
    own = overrides.get("transformer")
    sizes = base.get("transformer")
    known = sizes if isinstance(sizes, dict) else {}
    resized = isinstance(own, dict) and any(known.get(name) != size for name, size in own.items() if name != "sequence")
    if resized or not {"tensors", "tensors_file"}.isdisjoint(overrides):
        message = f"{share} is that of the {key}'s own model: write recompute, e.g. 0% for no activation checkpointing"
        refuse(key, [(("recompute",), message)])


def _unknown(kind: PresetKind, name: object) -> str:
    if isinstance(name, str) and name.endswith((".yaml", ".yml")):
        return f"unknown preset {shown(name)}: if that is a file, write {{file: {name}}}"
    return f"unknown preset {shown(name)}: {nearest(name, names(kind))}"


def _read_file(part: Part, name: object, folder: Path) -> dict[str, object]:
    """Read the file that a scenario names; each problem in it is one of the key `file`."""
    if not isinstance(name, str) or not name:
        refuse("file", [(("file",), f"{shown(name)} is not a file: write e.g. {part}.yaml")])
    file = folder / str(name)
    if not file.is_file():
        found = "is no regular file" if file.exists() else "there is no such file"
        hint = f"write the name of a {part} file, relative to the scenario"
        refuse("file", [(("file",), f"{file}: {found}: {hint}")])
    try:
        return read_part(part, file)
    except ScenarioError as error:
        refuse("file", [(("file",), line) for line in str(error).splitlines()])
        raise


def _merged(base: dict[str, object], overrides: dict[str, object]) -> dict[str, object]:
    replaced = {rival for key in overrides for rival in RIVALS.get(key_of(key), ())}  # keys, or attributes
    merged = {key: item for key, item in base.items() if key not in replaced}
    for key, item in overrides.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(item, dict) and item:  # who writes {} wants none
            merged[key] = _merged(below, item)
        else:
            merged[key] = item
    ranges = base.get("uncertain")
    own = overrides.get("uncertain", {})
    is_emptied = "uncertain" in overrides and not own
    if isinstance(ranges, dict) and isinstance(own, dict) and not is_emptied:  # who states another value measured it
        stated = {path: each for path, each in ranges.items() if _at(merged, path) == _at(base, path)}
        merged["uncertain"] = stated | own
    return merged


def _at(tree: object, path: str) -> object:
    """Return what stands at a path; None where nothing does."""
    from simdist.scenario.fields import parse_path

    for key in parse_path(path):
        match tree:
            case dict():
                tree = tree.get(key)
            case list() if isinstance(key, int) and key < len(tree):
                tree = tree[key]
            case _:
                return None
    return tree


def _folder(kind: PresetKind) -> Path:
    if kind not in get_args(PresetKind):
        raise ScenarioError(f"unknown kind of preset {shown(kind)}: {nearest(kind, get_args(PresetKind))}")
    return Path(str(resources.files("simdist.scenario") / "presets" / kind))
