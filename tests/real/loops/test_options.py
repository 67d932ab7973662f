"""The options of `real.wrap` are few and in groups."""

import inspect
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import real  # noqa: E402
from real import session  # noqa: E402
from real.kernels.topk import KERNELS_FROM  # noqa: E402
from simdist.cli import main  # noqa: E402
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


def test_a_run_directory_brings_the_size_from_which_kernels_select(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    class Spied(session.Memory):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            given.append(self.kernels_from)

    monkeypatch.setattr(session, "Memory", Spied)
    (tmp_path / "scenario.yaml").write_text(SCENARIO, encoding="utf-8")
    assert main(["plan", str(tmp_path / "scenario.yaml"), "-o", str(tmp_path / "run")]) == 0
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for schedule, n_steps in ((tmp_path / "run", None), (Sync(), 1)):
            module = torch.nn.Linear(6, 2)
            optimizer = torch.optim.SGD(module.parameters())
            ends_early = real.Averaging(final_average=False)
            alone = real.Launch(ranks_per_node=1)
            options = {"n_steps": n_steps, "averaging": ends_early, "launch": alone}
            with real.wrap(module, optimizer, schedule, **options) as worker:
                for _ in worker.steps():
                    module(torch.ones(3, 6)).sum().backward()
                    optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    assert given == [12345, KERNELS_FROM]


SCENARIO = """
cluster: {preset: ideal, nodes: 1, gpus_per_node: 1, device: {select_kernels_from: 12345}}
workload:
  tensors: [{name: weight, count: 12}, {name: bias, count: 2}]
  batch_size: 3
  forward: 1 ms
schedules: [{kind: local_sgd, period: 2}]
steps: 1
"""
