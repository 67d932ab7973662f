"""What a scenario keeps of its own when the preset or file below it is varied."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from simdist.scenario.loading import path_text
from simdist.sweep.paths import Field

_PARTS = ("cluster", "workload")
_BASES = ("preset", "file")
_CHOSEN = {
    "name",
    "source",
    "nodes",
    "gpus_per_node",
    "batch_size",
}  # by who asks


def kept_fields(tree: Mapping[str, Any], fields: Iterable[Field]) -> Iterator[str]:
    """Yield a warning for each preset or file that is varied while the scenario writes fields over it.

    Args:
        tree: The scenario, as a file has it.
        fields: What the sweep sets.

    >>> from simdist.sweep import loads
    >>> workload = "{preset: resnet50, batch_size: 32, forward: 30 ms}"
    >>> base = f"{{cluster: ideal, workload: {workload}, steps: 8, schedules: [{{kind: sync}}]}}"
    >>> loads(f"{{scenario: {base}, vary: {{workload.preset: [resnet50, vgg16]}}}}").warnings[0]
    'workload.preset is varied, but the scenario writes workload.forward, which all points keep: vary it as well, or ...
    """
    varied = {field.path for field in fields}
    for part in _PARTS:
        written = tree.get(part)
        base = next((base for base in _BASES if (part, base) in varied), None)
        if base is None or not isinstance(written, dict):
            continue
        of_sweep = {path[1] for path in varied if path[0] == part and len(path) > 1}
        if kept := [key for key in written if key not in {*_BASES, *_CHOSEN, *of_sweep}]:
            names = ", ".join(path_text((part, key)) for key in kept)
            them = "them" if len(kept) > 1 else "it"
            what = f"{part}.{base} is varied, but the scenario writes {names}, which all points keep"
            yield f"{what}: vary {them} as well, or remove {them} from the scenario"
