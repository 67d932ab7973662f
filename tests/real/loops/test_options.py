"""The options of `real.wrap` are few and in groups."""

import inspect

import pytest

torch = pytest.importorskip("torch")

import real  # noqa: E402
from simdist.errors import ScenarioError  # noqa: E402
from simdist.schedules import Sync  # noqa: E402


def error_of(**options: object) -> str:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError) as caught:
        real.wrap(module, torch.optim.SGD(module.parameters()), Sync(), **options)
    return str(caught.value)


def test_wrap_takes_at_most_nine_parameters() -> None:
    assert len(inspect.signature(real.wrap).parameters) <= 9


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
    with pytest.raises(ScenarioError, match=r"^start_timeout_s=-1; write seconds, more than 0$"):
        real.Launch(start_timeout_s=-1)
