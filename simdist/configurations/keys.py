"""Keys of a file of another program: each value has a type and bounds, and an error names file, key and value."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from simdist.errors import ScenarioError
from simdist.settings.base import nearest, shown

#: Most of any size in a file: layers, widths, tokens, ranks.
MOST = 10_000_000


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a file, or of a section of it. A key that is null counts as absent.

    Args:
        file: Name of the file, for errors.
        values: By key.
        above: Path of the section, such as `fsdp_config.`; empty for the file.
        read: Paths of keys that were read, of all sections.
    """

    file: str
    values: Mapping[str, object]
    above: str = ""
    read: set[str] = field(default_factory=set)

    def has(self, key: str) -> bool:
        """Tell whether a key has a value."""
        return self.get(key) is not None

    def get(self, key: str) -> object:
        """Return a value of any type; None if it is absent."""
        self.read.add(f"{self.above}{key}")
        return self.values.get(key)

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """Return a whole number within bounds.

        Raises:
            ScenarioError: It is none, or absent without a default.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ScenarioError(f"{self.file}: has no {self.above}{key}")
        if isinstance(value, float) and value.is_integer():  # 5e8
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refusal(key, f"write a whole number from {least} to {most}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return whether a key is set; raise ScenarioError for anything but true and false."""
        value = self.get(key)
        known = {"true": True, "false": False, "yes": True, "no": False}
        if isinstance(value, str):
            value = known.get(value.lower(), value)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, "write true or false")
        return value

    def word(self, key: str, default: str, known: Mapping[str, object] | None = None) -> str:
        """Return a word, one of those that are known; raise ScenarioError for another one."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refusal(key, "write a word")
        if known is not None and value not in known:
            raise self.refusal(key, f"is not supported: {nearest(value, list(known))}")
        return value

    def section(self, key: str) -> "Keys":
        """Return the keys below a key; none if it is absent."""
        value = self.get(key)
        if not isinstance(value, Mapping | None):
            raise self.refusal(key, "write keys below it")
        return Keys(self.file, value or {}, f"{self.above}{key}.", self.read)

    def skip(self, *keys: str) -> None:
        """Count keys as read: they change nothing here."""
        self.read.update(f"{self.above}{key}" for key in keys)

    def skip_all(self) -> None:
        """Count every key of the section as read."""
        self.read.update(path for path, _ in _flattened(self.values, self.above))

    def refusal(self, key: str, why: str) -> ScenarioError:
        """Return the error about the value of a key; `why` says what it is, or what to write."""
        value = self.values.get(key)
        text = "" if isinstance(value, Mapping) else f": {shown(value)}"
        colon = "" if why.startswith("is ") else ":"
        return ScenarioError(f"{self.file}: {self.above}{key}{text}{colon} {why}")

    def unread(self) -> list[str]:
        """Return the paths of keys that have a value and were not read, sorted."""
        paths = _flattened(self.values, self.above)
        return sorted(path for path, value in paths if value is not None and path not in self.read)


def _flattened(values: Mapping[str, object], above: str) -> Iterator[tuple[str, object]]:
    """Yield the path and the value of each key; a section's own path only if it is empty."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
