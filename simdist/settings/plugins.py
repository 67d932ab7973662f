"""Classes with which users extend simdist, in modules of their own, found by name.

A class has a name in one of two ways:

* `module:Class`. Python must find the module: in an installed package, in a folder on PYTHONPATH, or in the current
  directory, which is searched last. The folder of a scenario is not searched: reading a file must not run the code
  beside it.
* An *entry point* of an installed package, whose `pyproject.toml` gives the class a short name.

Importing a module runs its code.

Source:
    Python Packaging User Guide, Entry points specification.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from simdist.settings.base import Settings, nearest, shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_SettingsT = TypeVar("_SettingsT", bound=Settings)

# Groups of entry points that installed packages declare.
SCHEDULES = "simdist.schedules"
DISTURBANCES = "simdist.disturbances"
ALGORITHMS = "simdist.algorithms"
ACTORS = "simdist.actors"
STORAGES = "simdist.storages"


def is_reference(name: object) -> bool:
    """Tell whether a name consists of a module and an attribute, such as `gossip_sgd:GossipSGD`."""
    return isinstance(name, str) and ":" in name


def load_reference(
    reference: str,
    folder: Path,
    *,
    form: str = "module:Class, such as gossip_sgd:GossipSGD",
    is_wanted: Callable[[object], bool] = inspect.isclass,
) -> object:
    """Import the object that a name such as `gossip_sgd:GossipSGD` refers to.

    Args:
        reference: Module and attribute.
        folder: Folder of the file that names it. Only a hint in the error uses it.
        form: Correct form, for errors.
        is_wanted: Tells the objects of a module that errors propose.

    Raises:
        ValueError: There is no such module or attribute, or the module cannot be imported.
    """
    module_name, _, attribute = reference.partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(f"{shown(reference)}: write {form}")
    if module_name == "__main__":
        raise ValueError(f"{shown(reference)}: no other process finds a class of a script: put it in a module")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        is_there = importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:  # of a package above it
        is_there = False
    except Exception:  # of a package above it, which the import below tells
        is_there = True
    if not is_there:
        raise ValueError(f"{shown(reference)}: {_not_found(module_name, folder)}")
    module = _imported(module_name, reference)
    if attribute not in vars(module):
        wanted = {name: value for name, value in vars(module).items() if is_wanted(value)}
        own = [name for name, value in wanted.items() if inspect.getmodule(value) is module]
        raise ValueError(
            f"{shown(reference)}: {_place(module)} has no {attribute!r}; {nearest(attribute, own or wanted)}"
        )
    return vars(module)[attribute]


@lru_cache(maxsize=32)
def _entry_points(group: str, path: tuple[str, ...]) -> "dict[str, EntryPoint]":
    """Return the entry points of a group that installed packages on `path` declare."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for each in entry_points(group=group):
        other = found.setdefault(each.name, each)
        if other.value != each.value:
            raise ValueError(
                f"{_package(each)} and {_package(other)} both declare {each.name!r} in {group}: uninstall one of them"
            )
    return dict(sorted(found.items()))


def entry_points_of(group: str) -> "dict[str, EntryPoint]":
    """Return the entry points of a group by name.

    Raises:
        ValueError: Two packages declare the same name.
    """
    return _entry_points(group, tuple(sys.path))


def load_entry_point(entry_point: "EntryPoint") -> object:
    """Import the object that an entry point refers to.

    Raises:
        ValueError: Its module cannot be imported, or has no such attribute.
    """
    about = f"{_package(entry_point)}, entry point {entry_point.name} = {entry_point.value}"
    if not is_reference(entry_point.value):
        raise ValueError(f"{about}: write module:Class")
    module_name, _, attribute = entry_point.value.partition(":")
    module = _imported(module_name, about)
    if attribute not in vars(module):
        raise ValueError(f"{about}: {_place(module)} has no {attribute!r}: correct the package's pyproject.toml")
    return vars(module)[attribute]


@dataclass(frozen=True, slots=True)
class OpenKinds(Generic[_SettingsT]):
    """The classes of settings that a `kind` may name: classes that ship with simdist, and classes of users.

    Args:
        what: Name for errors, such as `schedule`.
        group: Group of entry points, such as `simdist.schedules`.
        bases: Returns base classes. Each class extends one of them; classes of users extend the first.
        shipped: Returns the classes that ship, by kind.
        shipped_as: Returns the class that ships for a kind, without importing others.
    """

    what: str
    group: str
    bases: Callable[[], tuple[type[_SettingsT], ...]]
    shipped: Callable[[], Mapping[str, type[_SettingsT]]]
    shipped_as: Callable[[str], type[_SettingsT] | None]

    def names(self) -> list[str]:
        """Return the kinds that need no module name."""
        return [*self.shipped(), *entry_points_of(self.group)]

    def find(self, kind: str, folder: Path = Path()) -> type[_SettingsT] | None:
        """Return the class that a kind names; None if there is none.

        Args:
            kind: The kind in a scenario.
            folder: Folder of the file that names it. Only a hint in the error uses it.

        Raises:
            ValueError: It names a module or an entry point without a suitable class.
        """
        if is_reference(kind):
            return self._checked(load_reference(kind, folder), kind)
        if shipped := self.shipped_as(kind):
            return shipped
        entry_point = entry_points_of(self.group).get(kind)
        return self._of_entry_point(entry_point) if entry_point else None

    def installed(self) -> dict[str, type[_SettingsT]]:
        """Return the classes that ship and the classes of all entry points, by kind.

        Raises:
            ValueError: The class of an entry point is unsuitable, or has the kind of a class that ships.
        """
        found = dict(self.shipped())
        for kind, entry_point in entry_points_of(self.group).items():
            if kind in found:
                raise ValueError(
                    f"{_package(entry_point)} declares {kind!r} in {self.group}, and simdist has a {self.what} of that "
                    f"kind: give it another"
                )
            found[kind] = self._of_entry_point(entry_point)
        return found

    def _of_entry_point(self, entry_point: "EntryPoint") -> type[_SettingsT]:
        about = f"{_package(entry_point)}, entry point {entry_point.name} = {entry_point.value}"
        cls = self._checked(load_entry_point(entry_point), about)
        if kind_of(cls) != entry_point.name:
            raise ValueError(f"{about}: the class has kind {kind_of(cls)!r}: give the entry point that name")
        return cls

    def _checked(self, found: object, name: str) -> type[_SettingsT]:
        """Return the class, if a `kind` may name it."""
        bases = self.bases()
        if not (inspect.isclass(found) and issubclass(found, bases)):
            first = f"{bases[0].__module__}.{bases[0].__name__}"
            raise ValueError(f"{shown(name)}: is no {self.what}: write a class that extends {first}")
        if inspect.isabstract(found):
            lacking = ", ".join(sorted(found.__abstractmethods__))
            raise ValueError(f"{shown(name)}: the class is abstract: write {lacking}")
        if not kind_of(found):
            example = f'kind: Literal["{found.__name__.lower()}"] = "{found.__name__.lower()}"'
            raise ValueError(f"{shown(name)}: the class has no kind: write {example}")
        return found


def kind_of(cls: type[Settings]) -> str:
    """Return the default of the field `kind`, or an empty string."""
    field = cls.model_fields.get("kind")
    return field.default if field and isinstance(field.default, str) else ""


def written_kind(cls: type[Settings], group: str) -> str:
    """Return the `kind` for a file, from which the class can be found again.

    Args:
        cls: A class that ships, or a class of a user.
        group: Group of entry points.
    """
    kind = kind_of(cls)
    if cls.__module__.partition(".")[0] == "simdist":
        return kind
    entry_point = entry_points_of(group).get(kind)
    is_installed = entry_point is not None and load_entry_point(entry_point) is cls
    return kind if is_installed else f"{cls.__module__}:{cls.__qualname__}"


@dataclass(frozen=True, slots=True)
class FixedKinds:
    """The classes of settings that a `kind` may name, where users cannot add any."""

    classes: Mapping[str, type[Settings]]

    def names(self) -> Iterable[str]:
        """Return the kinds."""
        return self.classes

    def find(self, kind: str, folder: Path) -> type[Settings] | None:
        """Return the class of a kind; None if there is none."""
        return self.classes.get(kind)


@lru_cache(maxsize=256)
def user_code_digest(name: str) -> str:
    """Return a digest of the file that defines a class of a user; empty for a name that ships with simdist.

    A stored result is valid only while the file is unchanged. Other files that it imports are not part of the digest.

    Args:
        name: `module:Class`, or the name of an entry point in a group of simdist.
    """
    try:
        if is_reference(name):
            return _source_digest(load_reference(name, Path()))
        found = [
            entry_points_of(group)[name]
            for group in (SCHEDULES, DISTURBANCES, ALGORITHMS, ACTORS, STORAGES)
            if name in entry_points_of(group)
        ]
        return "".join(_source_digest(load_entry_point(each)) for each in found)
    except ValueError:  # the error of the scenario that has the name says more
        return ""


def _source_digest(value: object) -> str:
    module = sys.modules[value.__module__ if inspect.isclass(value) else getattr(value, "messages", value).__module__]
    try:
        return hashlib.sha256(Path(inspect.getfile(module)).read_bytes()).hexdigest()
    except (OSError, TypeError):  # of an archive
        return ""


def _imported(module_name: str, about: str) -> object:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the code of a user raises
        raise ValueError(
            f"{about if ',' in about else shown(about)}: importing {module_name} fails: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}{_line_of(error)}: correct it there"
        ) from error


def _line_of(error: BaseException) -> str:
    """Return the file and line that raised an error, if known."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if os.path.exists(file) and "importlib" not in file and file != __file__:
            place = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


def _not_found(module_name: str, folder: Path) -> str:
    first, *_ = module_name.split(".")
    beside = folder.absolute()
    if (beside / f"{first}.py").exists() or (beside / first).is_dir():
        remedy = f"{beside} has one: run it from there, or write PYTHONPATH={beside} before the command"
    else:
        remedy = "correct the name, install its package, or write PYTHONPATH=FOLDER before the command"
    return f"no module {module_name!r} in the current directory, on PYTHONPATH or installed; {remedy}"


def _place(module: object) -> str:
    file = getattr(module, "__file__", None)
    return str(file) if file else str(getattr(module, "__name__", module))


def _package(entry_point: "EntryPoint") -> str:
    return f"package {entry_point.dist.name}" if entry_point.dist else "a package"
