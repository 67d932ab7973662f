"""Programs by their name on the command line."""

import sys
import types

import pytest
import torch

from real import models
from real.jobs import find_build, find_failures, find_links
from simdist.errors import ScenarioError


def mine(*, batch_size: int, device: torch.device, dtype: torch.dtype, seed: int) -> models.TrainingJob:
    return models.build_job("mlp", batch_size=batch_size, device=device, dtype=dtype, seed=seed)


def test_names_of_models_build_them_and_emulated_builds_nothing():
    assert find_build("emulated") is None
    build = find_build("mlp")
    assert build is not None
    job = build(batch_size=2, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    assert sum(parameter.numel() for parameter in job.module.parameters()) == 269_322


def test_function_of_a_module_of_ones_own_is_imported(monkeypatch):
    module = types.ModuleType("my_job")
    vars(module)["build"] = mine
    monkeypatch.setitem(sys.modules, "my_job", module)
    assert find_build("my_job:build") is mine


WRONG = {
    "no such model": ("resnet19", "there is no such program; there are emulated, bert-large, gpt-nano"),
    "no such module": ("no_such_module:build", "cannot import no_such_module: No module named"),
    "no such function": ("math:build", "math has no build"),
    "no function": ("math:pi", "pi is no function; see real.models.build_job for what it takes"),
}


@pytest.mark.parametrize(("name", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_program_is_refused(name, message):
    with pytest.raises(ScenarioError, match=f"--program {name}: {message}"):
        find_build(name)


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "quietly": "write MODULE:FUNCTION, or none to leave out what links do",
        "no_such_module:perform": "cannot import no_such_module: No module named",
        "math:pi": "pi is no function; see real.jobs.PerformLinks for what it takes",
    }.items(),
)
def test_what_performs_no_links_is_refused(name: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=f"--links {name}: {message}"):
        find_links(name)


def test_what_lets_no_node_fail_is_refused() -> None:
    assert find_failures(None) is None
    with pytest.raises(ScenarioError, match="--failures fail: write MODULE:FUNCTION, or leave it out"):
        find_failures("fail")


def test_nothing_performs_links_unless_it_is_named() -> None:
    assert find_links(None) is find_links("none") is None
