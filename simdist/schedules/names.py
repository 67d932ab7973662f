"""From names to classes of schedules: kinds, and labels."""

import functools
import importlib
import inspect
import os
import pkgutil
import sys

from simdist.schedules.base import Schedule
from simdist.settings.base import shown
from simdist.settings.plugins import SCHEDULES, OpenKinds, is_reference

_PACKAGE = "simdist.schedules"


def kinds() -> dict[str, type[Schedule]]:
    """Return every shipped schedule class by its `kind`, the name in scenarios, in alphabetical order.

    >>> kinds()["sync"].__name__
    'Sync'
    """
    return dict(_kinds(tuple((folder, _changed_ns(folder)) for folder in _folders())))


@functools.lru_cache(maxsize=4)
def _kinds(folders: tuple[tuple[str, int], ...]) -> dict[str, type[Schedule]]:
    """Import every module of the package. `folders` and their change times are the key of the cache."""
    found: dict[str, type[Schedule]] = {}
    for module in pkgutil.iter_modules(_folders(), f"{_PACKAGE}."):
        for kind, value in _defined_in(module.name).items():
            if found.setdefault(kind, value) is not value:
                raise TypeError(f"{value.__module__} and {found[kind].__module__} both define schedule {kind!r}")
    return dict(sorted(found.items()))


def _shipped_as(kind: str) -> type[Schedule] | None:
    """Return the class of a shipped kind; None if there is none.

    A scenario names two or three schedules. To read it, only their modules are imported.

    >>> _shipped_as("sync").__name__, _shipped_as("parts")
    ('Sync', None)
    """
    quick = tuple((folder, _changed_ns(folder)) for folder in _folders())
    return _in_module_of(kind, quick).get(kind) or kinds().get(kind)


@functools.lru_cache(maxsize=64)
def _in_module_of(kind: str, folders: tuple[tuple[str, int], ...]) -> dict[str, type[Schedule]]:
    modules = {module.name for module in pkgutil.iter_modules(_folders())}
    return _defined_in(f"{_PACKAGE}.{kind}") if kind in modules else {}


def _defined_in(module: str) -> dict[str, type[Schedule]]:
    classes = (value for value in vars(importlib.import_module(module)).values() if inspect.isclass(value))
    schedules = (value for value in classes if issubclass(value, Schedule) and not inspect.isabstract(value))
    return {value.model_fields["kind"].default: value for value in schedules}


def _folders() -> list[str]:
    """Return the folders of the package's modules. Importing the package here would be a circle."""
    return list(sys.modules[_PACKAGE].__path__)


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:  # a package in an archive does not change
        return 0


def _bases() -> tuple[type[Schedule]]:
    return (Schedule,)


#: The classes that `kind` may name in a scenario.
KINDS: OpenKinds[Schedule] = OpenKinds("schedule", SCHEDULES, _bases, kinds, _shipped_as)


def settings_of_name(value: object) -> object:
    """Return the settings of a schedule that is written as its kind or as its label; what is no text stays as it is.

    Raises:
        ValueError: No schedule has that kind or label.

    >>> settings_of_name("local-8"), settings_of_name("hsgd-2-4,8-world")
    ({'kind': 'local_sgd', 'period': 8}, {'kind': 'hierarchical_sgd', 'levels': {2: 4, 8: 'world'}})
    """
    if not isinstance(value, str):
        return value
    if is_reference(value) or value in KINDS.names():
        return {"kind": value}
    for kind, cls in KINDS.installed().items():
        settings = cls.settings_of_label(value)
        if settings is not None:
            return {"kind": kind, **settings}
    raise ValueError(
        f"there is no schedule {shown(value)}: write its kind, such as sync; a label as tables print it, such as "
        f"hsdp-8 or hsgd-2-4,8-world; or a mapping, such as {{kind: local_sgd, period: 8}}"
    )
