"""The options of `real.wrap` are few, in groups, and name the place of what was a keyword before."""

import inspect

import pytest

torch = pytest.importorskip("torch")

import real  # noqa: E402
from simdist.errors import ScenarioError  # noqa: E402
from simdist.schedules import Sync  # noqa: E402

MOVED = {
    "outer_optimizer": "averaging=real.Averaging(outer_optimizer=...)",
    "final_average": "averaging=real.Averaging(final_average=...)",
    "average_buffers": "averaging=real.Averaging(average_buffers=...)",
    "checkpoint": "checkpointing=real.Checkpointing(folder=...)",
    "every": "checkpointing=real.Checkpointing(every=...)",
    "also": "checkpointing=real.Checkpointing(also=...)",
    "trace": "experiment=real.Experiment(trace=...)",
    "delays": "experiment=real.Experiment(delays=...)",
    "ranks_per_node": "launch=real.Launch(ranks_per_node=...)",
    "timeout_s": "launch=real.Launch(timeout_s=...)",
}


def error_of(**options: object) -> str:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError) as caught:
        real.wrap(module, torch.optim.SGD(module.parameters()), Sync(), **options)
    return str(caught.value)


def test_wrap_takes_at_most_ten_parameters() -> None:
    assert len(inspect.signature(real.wrap).parameters) <= 10


@pytest.mark.parametrize("name", MOVED)
def test_a_keyword_of_an_earlier_release_names_its_new_place(name: str) -> None:
    assert error_of(**{name: 1}) == f"real.wrap() takes no {name}=: write {MOVED[name]}"


def test_the_new_places_are_there() -> None:
    for place in MOVED.values():
        parameter, _, call = place.partition("=real.")
        kind, _, field = call.partition("(")
        assert parameter in inspect.signature(real.wrap).parameters
        assert field.removesuffix("=...)") in inspect.signature(getattr(real, kind)).parameters


def test_keywords_of_an_earlier_release_are_told_at_once() -> None:
    assert error_of(checkpoint="saved", timeout_s=3.0, every=20) == (
        "real.wrap() takes no checkpoint=, timeout_s=, every=: write "
        "checkpointing=real.Checkpointing(folder=..., every=...), launch=real.Launch(timeout_s=...)"
    )


def test_a_keyword_that_never_was_is_refused() -> None:
    assert error_of(steps=3) == (
        "real.wrap() takes no steps=: write n_steps, first_step, averaging, checkpointing, experiment or launch"
    )


def test_what_is_no_group_of_options_is_refused() -> None:
    assert error_of(checkpointing="saved") == (
        "real.wrap(checkpointing='saved'): write checkpointing=real.Checkpointing(...)"
    )
    assert error_of(launch=None) == "real.wrap(launch=None): write launch=real.Launch(...)"


def test_groups_refuse_values_as_they_are_made() -> None:
    with pytest.raises(ScenarioError, match=r"^every=0; checkpoints are at least 1 step apart$"):
        real.Checkpointing("saved", every=0)
    with pytest.raises(ScenarioError, match=r"^timeout_s=0; write seconds, more than 0$"):
        real.Launch(timeout_s=0)
