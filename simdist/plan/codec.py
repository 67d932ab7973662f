"""Plans as JSON: the file `plan.json`, written and read.

The document is what the dataclasses say, each operation tagged with its class in `op`. Reading is strict: wrong types,
unknown fields and unknown operations are refused, with the place in the document.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from simdist.errors import PlanError
from simdist.files import read_content
from simdist.plan import ops
from simdist.plan.group import Group
from simdist.plan.plan import Buffer, Dataset, Plan, Run

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_OP_CLASSES: dict[str, type] = {cls.__name__: cls for cls in get_args(ops.Op)}


def dumps(plan: Plan) -> str:
    """Return the plan as a JSON document, one operation a line."""
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
        PlanError: Not JSON, or not a plan; the message names every wrong place.
    """
    from pydantic import ValidationError

    try:
        raw = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"{name}: not a JSON document: {error}; a plan is what `simdist plan SCENARIO -o RUN` writes"
        ) from None
    problems = list(_unknown(raw))
    try:
        decoded = _adapter().validate_json(text, strict=True)
    except ValidationError as error:
        problems += [_problem_text(problem["loc"], problem["msg"], problem["input"]) for problem in error.errors()]
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
        text = read_content(path, line_nbytes=None).decode()  # a data set is one line, of millions of sizes
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
    """Build an object; of two equal keys, one would be lost."""
    known = dict(pairs)
    if len(known) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return known


def _unknown(raw: Any) -> Iterator[str]:
    """Name every field that the format does not have."""
    if not isinstance(raw, dict):
        return
    yield from _extra(raw, {"format", "name", "world_size", "buffers", "bodies", "order", "dataset"}, "")
    yield from _extra(raw.get("dataset"), _fields(Dataset), "dataset.")
    for kind, cls in (("buffers", Buffer), ("order", Run)):
        for number, item in enumerate(_items(raw.get(kind))):
            yield from _extra(item, _fields(cls), f"{kind}[{number}].")
    for number, body in enumerate(_items(raw.get("bodies"))):
        for position, op in enumerate(_items(body)):
            cls_or_none = _OP_CLASSES.get(str(op.get("op"))) if isinstance(op, dict) else None
            if cls_or_none:
                place = f"bodies[{number}][{position}]."
                yield from _extra(op, _fields(cls_or_none) | {"op"}, place)
                for group in ("group", "by"):
                    yield from _extra(op.get(group), _fields(Group), f"{place}{group}.")
                yield from _extra(op.get("servers"), _fields(ops.Servers), f"{place}servers.")
                yield from _extra(op.get("queue"), _fields(ops.Queue), f"{place}queue.")


def _extra(item: Any, known: set[str], place: str) -> Iterator[str]:
    if isinstance(item, dict):
        for key in item:
            if key not in known:
                yield f"{place}{key}: unknown field; known: {', '.join(sorted(known))}"


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _fields(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _problem_text(loc: tuple[int | str, ...], message: str, found: object) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if part not in _OP_CLASSES)
    shown = repr(found)
    return f"{place.lstrip('.') or 'document'}: {message}; found {shown if len(shown) <= 60 else shown[:57] + '...'}"
