"""Names that PyTorch's FSDP has for its strategies, and how configurations write types and trees of keys."""

import re
from collections.abc import Mapping

from simdist.configurations.described import Mesh, ScheduleSettings
from simdist.configurations.keys import Keys
from simdist.settings.precision import Precision

_NUMBERS = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}
_STRATEGIES: dict[str, tuple[int | None, str | None, bool]] = {  # copies, ranks of each, freed after the forward pass
    "FULL_SHARD": (1, None, True),
    "SHARD_GRAD_OP": (1, None, False),
    "NO_SHARD": (None, "1", True),
    "HYBRID_SHARD": (None, "node", True),
    "HYBRID_SHARD_ZERO2": (None, "node", False),
    "_HYBRID_SHARD_ZERO2": (None, "node", False),
}
#: Types by the precision of mixed precision.
DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp16": "float16"}
_INTERPOLATED = re.compile(r"\$\{([\w.]+)\}")


def mesh_of(keys: Keys, key: str, settings: ScheduleSettings) -> Mesh:
    """Return the mesh of an FSDP strategy. Blocks are units, and what stands before and after them forms the root.

    Raises:
        ScenarioError: It has another strategy.
    """
    value = keys.get(key)
    if isinstance(value, int) and value in _NUMBERS:
        name = _NUMBERS[value]
    else:
        name = keys.word(key, "FULL_SHARD", _STRATEGIES)
    replicate, shard, is_freed = _STRATEGIES[name]
    more = (("wrap", "blocks"), *(() if is_freed else (("reshard_after_forward", False),)))
    where = f"{keys.file}: {keys.above}{key}"
    return Mesh(replicate, "node" if shard == "node" else 1 if shard else None, where, (*more, *settings))


def interpolated(values: Mapping[str, object]) -> dict[str, object]:
    """Return keys with the values that `${path.of.another}` names; a name that leads nowhere stays as it is.

    >>> interpolated({"variables": {"n": 8}, "model": {"n": "${variables.n}"}})["model"]
    {'n': 8}
    """
    return {key: _resolved(value, values, 0) for key, value in values.items()}


def _resolved(value: object, root: Mapping[str, object], depth: int) -> object:
    if isinstance(value, Mapping):
        return {key: _resolved(item, root, depth) for key, item in value.items()}
    match = _INTERPOLATED.fullmatch(value) if isinstance(value, str) else None
    if match is None or depth > 8:  # a name that leads to itself
        return value
    found: object = root
    for key in match[1].split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return value if found is None else _resolved(found, root, depth + 1)
