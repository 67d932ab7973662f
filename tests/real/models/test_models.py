"""The models that ship with the real backend: their tensors are those of the workload presets, and they train."""

import sys

import pytest
from scripts import ROOT, load_script

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from real import models  # noqa: E402
from simdist import scenario  # noqa: E402
from simdist.errors import RunError  # noqa: E402
from simdist.scenario import presets  # noqa: E402

CPU = torch.device("cpu")
SMALL = ["mlp", "gpt-nano"]


def build(
    name: str = "mlp", *, batch_size: int = 4, dtype: torch.dtype = torch.float32, seed: int = 0
) -> models.TrainingJob:
    return models.build_job(name, batch_size=batch_size, device=CPU, dtype=dtype, seed=seed)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def train(job: models.TrainingJob, n_steps: int) -> list[float]:
    losses = []
    for step in range(n_steps):
        inputs, targets = job.batch(step, 0)
        job.optimizer.zero_grad()
        loss = job.loss(job.module(inputs), targets)
        loss.backward()
        job.optimizer.step()
        losses.append(loss.item())
    return losses


def test_every_model_is_a_workload_preset() -> None:
    assert models.names() == sorted(models.names())
    assert set(models.names()) <= set(presets.names("workloads"))
    assert {"mlp", "gpt-nano", "gpt2", "resnet18", "resnet50", "vgg16"} <= set(models.names())


@pytest.mark.parametrize("name", models.names())
def test_parameters_are_the_tensors_of_the_preset_in_their_order(name: str) -> None:
    text = f"name: m\ncluster: dgx-a100\nworkload: {name}\nschedules:\n  - kind: sync\nsteps: 1\nseed: 0\n"
    tensors = scenario.loads(text).workload.tensors
    with torch.device("meta"):
        module = models.create(name)
    assert [(name, parameter.numel()) for name, parameter in module.named_parameters()] == [
        (tensor.name, tensor.count) for tensor in tensors
    ]


@pytest.mark.parametrize("name", models.names())
def test_models_state_how_many_outputs_they_have(name: str) -> None:
    with torch.device("meta"):
        module = models.create(name)
        inputs, _ = models._MODELS[name].source(2, torch.float32, torch.Generator("cpu"))
        assert module(inputs.to("meta")).shape[-1] == models._MODELS[name].n_classes


def test_presets_are_what_the_tool_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["count_tensors.py", "--check"])
    assert load_script(ROOT / "tools" / "count_tensors.py").main() == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", SMALL)
def test_loss_falls(name: str) -> None:
    losses = train(build(name, batch_size={"mlp": 32, "gpt-nano": 2}[name]), {"mlp": 60, "gpt-nano": 40}[name])
    assert losses[0] == pytest.approx({"mlp": 2.30, "gpt-nano": 5.55}[name], abs=0.15)  # ln 10, ln 256: knows nothing
    assert sum(losses[-5:]) / 5 < 0.97 * losses[0]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_every_tensor_of_a_resnet_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    module = models.create(name)
    logits = module(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 1000)
    logits.logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_output_of_a_vgg_keeps_the_scale_of_its_input() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        logits = models.create("vgg16")(torch.randn(1, 3, 224, 224))
    assert 0.1 < float(logits.std()) < 10


def test_gpt_does_not_look_ahead() -> None:
    job = build("gpt-nano")
    tokens = job.batch(0, 0)[0][:1]
    changed = tokens.clone()
    changed[0, 100] = (changed[0, 100] + 1) % 256
    with torch.no_grad():
        before, after = job.module(tokens), job.module(changed)
    assert torch.allclose(before[:, :100], after[:, :100], atol=1e-6)
    assert not torch.allclose(before[:, 100:], after[:, 100:], atol=1e-6)


def test_gradients_become_complete_in_reverse_order_of_the_tensors_of_a_chain() -> None:
    job, completed = build("mlp"), []
    for i, parameter in enumerate(job.module.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: completed.append(i))
    train(job, 1)
    assert [i // 2 for i in completed] == [2, 2, 1, 1, 0, 0]  # within a layer, weight and bias come together


def test_gradient_of_the_tied_embedding_is_complete_once_and_last() -> None:
    job, completed = build("gpt-nano"), []
    for name, parameter in job.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: completed.append(name))
    train(job, 1)
    assert completed.count("token.weight") == 1
    assert set(completed[-2:]) == {"token.weight", "position.weight"}


@pytest.mark.parametrize("name", SMALL)
def test_equal_seeds_give_equal_parameters_and_batches(name: str) -> None:
    one, same, other = (build(name, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(flat(one.module), flat(same.module))
    assert not torch.equal(flat(one.module), flat(other.module))
    assert all(torch.equal(a, b) for a, b in zip(one.batch(5, 2), same.batch(5, 2), strict=True))
    assert not torch.equal(one.batch(5, 2)[0], other.batch(5, 2)[0])


def test_building_leaves_the_default_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    build("mlp")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("batch_size", [1, 32])
def test_ranks_and_steps_have_different_batches_of_one_pool(batch_size: int) -> None:
    job = build("mlp", batch_size=batch_size)
    batches = [job.batch(step, rank)[0] for step in range(4) for rank in range(8)]
    assert all(batch.shape == (batch_size, 784) for batch in batches)
    assert len({batch.data_ptr() for batch in batches}) == len(batches)
    assert len({batch.untyped_storage().data_ptr() for batch in batches}) == 1  # made once, nothing is copied
    assert job.batch(2, 3)[0].data_ptr() == job.batch(2, 3)[0].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_model_trains_in_its_dtype(name: str, dtype: torch.dtype) -> None:
    job = build(name, dtype=dtype)
    assert {parameter.dtype for parameter in job.module.parameters()} == {dtype}
    assert train(job, 2)[1] > 0


def test_module_goes_to_its_device() -> None:
    job = models.build_job("mlp", batch_size=2, device=torch.device("meta"), dtype=torch.float32, seed=0)
    assert {parameter.device.type for parameter in job.module.parameters()} == {"meta"}
    assert job.batch(0, 0)[0].device == CPU


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(RunError, match="no model 'resnet-50'; did you mean 'resnet50'"):
        build("resnet-50")


def test_empty_batch_is_refused() -> None:
    with pytest.raises(RunError, match="batch_size is 0; must be at least 1"):
        build("mlp", batch_size=0)
