"""Plans as JSON: write and read the file `plan.json`.

The document mirrors the dataclasses. Each operation is tagged with its class in `op`. Reading is strict: it refuses
wrong types, unknown fields and unknown operations, and names the place in the document.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from simdist.errors import PlanError
from simdist.files import read_content
from simdist.plan import ops
from simdist.plan.plan import Buffer, Dataset, Plan, Run

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_OP_CLASSES: dict[str, type] = {cls.__name__: cls for cls in get_args(ops.Op)}


def dumps(plan: Plan) -> str:
    """Return the plan as a JSON document, one operation per line."""
    document = plan.document()
    bodies = ",\n".join("  [\n    " + ",\n    ".join(map(_compact, body)) + "\n  ]" for body in document.pop("bodies"))
    head = ",\n".join(f'"{key}": {_compact(value)}' for key, value in document.items() if key != "buffers")
    buffers = ",\n  ".join(map(_compact, document["buffers"]))
    return f'{{\n{head},\n"buffers": [\n  {buffers}\n],\n"bodies": [\n{bodies}\n]\n}}\n'


def loads(text: str, *, name: str = "<text>") -> Plan:
    """Read a plan from JSON.

    Args:
        text: The document.
        name: Name for errors: a file name.

    Raises:
        PlanError: Not JSON, or not a plan. The message names every wrong place.
    """
    from pydantic import ValidationError

    try:
        raw = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)  # Pythons word it differently
        raise PlanError(
            f"{name}: not a JSON document: {reason}; a plan is what `simdist plan SCENARIO -o RUN` writes"
        ) from None
    try:
        decoded = _adapter().validate_json(text, strict=True)
        problems = list(_unknown(raw, decoded))
    except ValidationError as error:
        problems = [_problem_text(problem["loc"], problem["msg"], problem["input"]) for problem in error.errors()]
    if problems:
        raise PlanError("\n".join(f"{name}: {problem}" for problem in problems))
    return Plan(decoded.name, decoded.world_size, decoded.buffers, decoded.bodies, decoded.order, decoded.dataset)


def save(plan: Plan, path: Path | str) -> None:
    """Write the plan to a file."""
    Path(path).write_text(dumps(plan), encoding="utf-8")


def load(path: Path | str) -> Plan:
    """Read a plan from a file.

    Raises:
        PlanError: The file cannot be read, or is not a plan.
    """
    try:
        text = read_content(path, line_nbytes=None).decode()  # a data set of millions of sizes is a single line
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read as a plan: {error}") from None
    return loads(text, name=str(path))


def _compact(value: object) -> str:
    return json.dumps(value, separators=(", ", ": "))


def _adapter() -> "TypeAdapter[Any]":
    """Build the reader: the plan's dataclasses, with operations told apart by their `op` tag."""
    from typing import Literal, Union

    from pydantic import Discriminator, Tag, TypeAdapter
    from pydantic.dataclasses import dataclass

    def tag(raw: Any) -> str:
        return str(raw.get("op")) if isinstance(raw, dict) else type(raw).__name__

    any_op: Any = Union[tuple(Annotated[cls, Tag(name)] for name, cls in _OP_CLASSES.items())]  # noqa: UP007
    tagged: Any = Annotated[any_op, Discriminator(tag)]

    @dataclass
    class PlanDocument:
        format: Literal["simdist-plan-1"]
        name: str
        world_size: int
        buffers: tuple[Buffer, ...]
        bodies: tuple[tuple[tagged, ...], ...]
        order: tuple[Run, ...]
        dataset: Dataset | None = None

    return TypeAdapter(PlanDocument)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object. Refuse a repeated key, because one of its values would be lost."""
    known = dict(pairs)
    if len(known) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return known


def _unknown(raw: Any, decoded: Any, place: str = "") -> Iterator[str]:
    """Yield an error for every field that the decoded value does not have."""
    if isinstance(raw, list):
        for number, (item, made) in enumerate(zip(raw, decoded, strict=True)):
            yield from _unknown(item, made, f"{place}[{number}]")
    elif isinstance(raw, dict):
        known = {field.name for field in dataclasses.fields(decoded)}
        known |= {"op"} & raw.keys() if type(decoded) in _OP_CLASSES.values() else set()
        for key, item in raw.items():
            where = f"{place}.{key}".lstrip(".")
            if key not in known:
                yield f"{where}: unknown field; known: {', '.join(sorted(known))}"
            elif key != "op":
                yield from _unknown(item, getattr(decoded, key), where)


def _problem_text(loc: tuple[int | str, ...], message: str, found: object) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if part not in _OP_CLASSES)
    shown = repr(found)
    return f"{place.lstrip('.') or 'document'}: {message}; found {shown if len(shown) <= 60 else shown[:57] + '...'}"
