"""Labels of schedules, which tables print and scenarios take."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError
from tiers import examples

from simdist.errors import ScenarioError
from simdist.scenario import dump, load, loads
from simdist.schedules import FSDP, HSDP, KINDS, DiLoCo, HierarchicalSGD, LocalSGD, Schedule, kinds, settings_of_name
from simdist.schedules.labels import Piece
from simdist.settings.plugins import kind_of

JOB = {"cluster": "v100x8-25gbit", "workload": "resnet50", "steps": 2}
FP16 = {"compression": "fp16"}
DTYPES = ["float16", "bfloat16"]
VALUES: dict[str, list[object]] = {
    "accumulation": ["local"],
    "all_reduce": ["last"],
    "algorithm": ["ring", "double_tree"],
    "apart": [True],
    "backup": [0, 2, 12],
    "between": [LocalSGD(period=4), HierarchicalSGD(levels={2: 4, 8: "world"}), DiLoCo(period=8, compression="fp16")],
    "blocking": [True],
    "broadcast": [True],
    "bucket_nbytes": [None, 4 * 2**20],
    "communicators": [2],
    "compression": ["fp16", "bf16"],
    "density": [0.001, 0.25, 1.0],
    "fragments": [2],
    "fusion": [{}],
    "inner_steps": ["by_speed"],
    "input": [
        *({"policy": policy} for policy in ("naive", "datacache")),
        {"decode_workers": 3},
        {"prefetch": 4, "readers": 2},
    ],
    "intra_node_gradients": [True],
    "layers": [6],
    "levels": [{2: 4}, {2: 4, 4: 8, 8: "world"}],
    "matching": ["ring"],
    "matchings": [2, 16],
    "method": ["exact", "mstopk", "dgc"],
    "min_compression_rate": [1.5, 4.0],
    "mixing": [0.5, 0.125],
    "overlap_steps": [1, 2],
    "parallel_optimizer": [True],
    "param_dtype": DTYPES,
    "period": [8, 100],
    "placement": ["tensors", "greedy"],
    "pull": ["tensor", "step"],
    "rank": [1, 16],
    "ranks_per_worker": ["node", 4],
    "reshard_after_forward": [True, False, 4],
    "seed": [1, 12],
    "servers": [1, 4, "world"],
    "shard": [2, 16],
    "shared_update": [True, "node", 4],
    "updates_sent_by": ["broadcast"],
    "warmup_steps": [3],
    "wrap": ["blocks"],
}
EXAMPLES = [cls(**example) for cls in kinds().values() for example in cls.examples]


def read(label: str) -> Schedule:
    written = settings_of_name(label)
    assert isinstance(written, dict)
    cls = KINDS.find(written["kind"])
    assert cls is not None
    return cls.model_validate(written)


def pieces(cls: type[Schedule]) -> tuple[Piece, ...]:
    assert cls.label_form is not None
    return cls.label_form[1]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draw a schedule with any of the settings that its label shows."""
    cls = draw(st.sampled_from(list(kinds().values())))
    shown = [each for each in pieces(cls) if each.is_required or draw(st.booleans())]
    chosen = {each.field: draw(st.sampled_from(VALUES[each.field])) for each in shown}
    chosen |= {"input": draw(st.sampled_from(VALUES["input"]))} if draw(st.booleans()) else {}
    assume("updates_sent_by" not in chosen or "shared_update" in chosen)  # alone it fits no cluster
    try:
        return cls.model_validate({"kind": kind_of(cls)} | chosen)
    except ValidationError:
        assume(False)
        raise


@given(schedules())
@examples(300)
def test_label_is_read_as_the_schedule_that_it_names(schedule: Schedule) -> None:
    assert read(schedule.name) == schedule


@pytest.mark.parametrize("schedule", EXAMPLES, ids=lambda each: each.name)
def test_label_of_an_example_is_read_without_the_settings_that_it_does_not_show(schedule: Schedule) -> None:
    if "-uneven" in schedule.name:
        with pytest.raises(ValueError, match="there is no schedule"):
            read(schedule.name)
        return
    again = read(schedule.name)
    assert again.name == schedule.name
    for each in pieces(type(schedule)):
        if each.field not in ("fusion", "between"):
            assert dict(again)[each.field] == dict(schedule)[each.field]


@pytest.mark.parametrize(
    ("label", "schedule"),
    [
        ("fsdp-bfloat16-reshard-8-root-2-comms", {"kind": "fsdp", "param_dtype": "bfloat16"}),
        ("hsdp-8-local", HSDP(shard=8, accumulation="local")),
        ("hsdp-8-local-2-comms", HSDP(shard=8, accumulation="local", communicators=2)),
        ("hsdp-8-local-2-2-comms", HSDP(shard=8, between="local-2", communicators=2)),
        ("hsdp-8-local-4-last-keep", HSDP(shard=8, between="local-4", all_reduce="last", reshard_after_forward=False)),
        ("fsdp-forward_prefetch-2-backward_prefetch-3", FSDP(forward_prefetch=2, backward_prefetch=3)),
        ("sync-4MiB+prefetch4", {"kind": "sync", "bucket_size": "4 MiB", "input": {"prefetch": 4}}),
        (
            "gtopk-0.25-dgc-broadcast-fp16",
            {"kind": "gtopk", "density": 0.25, "method": "dgc", "broadcast": True, **FP16},
        ),
        ("hsgd-2-4,4-world-overlap1", {"kind": "hierarchical_sgd", "levels": {2: 4, 4: "world"}, "overlap_steps": 1}),
    ],
)
def test_label_is_a_schedule_of_a_scenario(label: str, schedule: object) -> None:
    (found,) = load(JOB | {"schedules": [label]}).schedules
    head, _, _ = dump(load(JOB | {"schedules": ["sync"]})).partition("schedules:")
    assert loads(f"{head}schedules: ['{label}']").schedules == (found,)
    if label.startswith("fsdp-bfloat16"):
        assert isinstance(found, FSDP)
        assert (found.name, found.reshard_after_forward, found.wrap, found.communicators) == (label, 8, "blocks", 2)
        return
    (written,) = load(JOB | {"schedules": [schedule]}).schedules
    assert found == written


@pytest.mark.parametrize(
    "label",
    ["hsdp-8-locl-4", "fsdp-kept", "fsdp-no_such_field-2", "sync+cached", "local-8-uneven", "sync-mb4"],
)
def test_what_is_no_label_is_refused(label: str) -> None:
    with pytest.raises(ScenarioError, match=r"there is no schedule .*a label as tables print it"):
        load(JOB | {"schedules": [label]})
