"""Scripts by Accelerate, Lightning and Hugging Face's Trainer, for ranks that are started as by torchrun.

Each checks what it has computed. `run_all` runs those of one tool, and names each that has passed.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import leave_group
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from user_scripts import N_STEPS, SCHEDULES, Way, batches, mlp, vector

import real
from simdist.errors import RunError
from simdist.schedules import LocalSGD, Schedule

if TYPE_CHECKING:
    from lightning import Callback, LightningModule
    from lightning import Trainer as LightningTrainer
    from transformers import Trainer, TrainerCallback, TrainingArguments


def connect() -> None:
    """Connect the ranks, unless a script before has done it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def check_equal(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def accelerate(way: str) -> None:
    """Accumulates and clips gradients. The last pass over the loader is alone in its step."""
    from accelerate import Accelerator

    from real.frameworks.accelerate import follow

    def train(own: bool) -> np.ndarray:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        module = mlp(torch.float32)
        n_samples = 5 * accelerator.num_processes * (2 * N_STEPS - 1)
        optimizer, loader = accelerator.prepare(
            torch.optim.AdamW(module.parameters(), lr=0.01), DataLoader(samples(n_samples), batch_size=5)
        )
        if own:
            model = accelerator.prepare(module)
        else:
            model = follow(accelerator, module, optimizer, SCHEDULES[way])
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(batch["inputs"]), batch["labels"]))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        if not own:
            assert model.step == N_STEPS
            model.close()
        return vector(module)

    check_equal(train(own=False), train(own=True))


def net_task() -> "type[LightningModule]":
    """Return a task of Lightning that trains `net` with SGD; ranks that need no Lightning do not load it."""
    import lightning

    class NetTask(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

    return NetTask


def cpu_trainer(schedule: Schedule | None, *callbacks: "Callback", **options: Any) -> "LightningTrainer":
    """Return a trainer of one device whose `net` follows a schedule, if there is one."""
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from real.frameworks.lightning import schedule_callback

    follows = [schedule_callback(schedule, network="net")] if schedule else []
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[LightningEnvironment()],
        callbacks=[*follows, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False} | options,
    )


def lightning(way: str) -> None:
    """Each rank has a trainer of one device. Lightning trains in the closure of `optimizer.step`."""

    class Task(net_task()):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor | None:
            return None if number == 1 else super().training_step(batch, number)  # all ranks leave this batch out

    connect()
    task = Task()
    trainer = cpu_trainer(SCHEDULES[way], max_steps=N_STEPS, gradient_clip_val=0.5)
    trainer.fit(task, DataLoader([*batches()], batch_size=None))
    check_equal(vector(task.net), by_torch("ddp" if way == "sync" else f"{way} by hand"))


def by_torch(way_name: str) -> np.ndarray:
    """Train as `lightning` does, without Lightning."""
    way = Way(way_name)
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = way.connect(module, optimizer)
    for number, (inputs, targets) in enumerate(batches()):
        optimizer.zero_grad()
        if number == 1:
            way.updated(module)
            continue
        functional.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        way.updated(module)
    return vector(module)


class Classifier(nn.Module):
    """Computes its loss, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(torch.float32)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def samples(n_samples: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"inputs": torch.randn(6, generator=generator), "labels": torch.randint(3, (), generator=generator)}
        for _ in range(n_samples)
    ]


def arguments(folder: Path, **options: object) -> "TrainingArguments":
    """Return arguments of a short training on a CPU."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=N_STEPS,
        per_device_train_batch_size=5,
        report_to=[],
        disable_tqdm=True,
        **options,
    )


def trainer(way: str, folder: Path) -> None:
    """Trains in processes of a node. Accumulates and clips gradients."""
    from transformers import Trainer

    from real.frameworks.transformers import follow

    def train(wrapped: bool) -> np.ndarray:
        module = Classifier()
        made = Trainer(
            model=module,
            args=arguments(folder, gradient_accumulation_steps=2, learning_rate=0.01, save_strategy="no"),
            train_dataset=samples(240),
        )
        if wrapped:
            follow(made, SCHEDULES[way])
        made.train()
        return vector(module)

    wrapped = train(wrapped=True)
    check_equal(wrapped, train(wrapped=False))


# --- saves, evaluations and restarts between averages ---


def of_all_ranks(module: nn.Module) -> list[np.ndarray]:
    mine = torch.from_numpy(vector(module))
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [each.numpy() for each in found]


def check_average(module: nn.Module, where: str) -> None:
    """Check that all ranks have the same parameters."""
    first, *others = of_all_ranks(module)
    assert all((each == first).all() for each in others), f"ranks differ {where}"


def saving_trainer(
    module: nn.Module, folder: Path, callback: "TrainerCallback", *, every: int, **options: object
) -> "Trainer":
    """Return a Trainer with a callback that saves and evaluates every few steps, and has other options besides."""
    from transformers import Trainer

    how = {"learning_rate": 0.1, "optim": "sgd", "save_steps": every, "eval_strategy": "steps", "eval_steps": every}
    return Trainer(
        model=module,
        args=arguments(folder, **how, **options),
        train_dataset=samples(240),
        eval_dataset=samples(20),
        callbacks=[callback],
    )


def trainer_resumed(folder: Path) -> None:
    """Saves and evaluates in every third step, and goes on from the second checkpoint."""
    from transformers import TrainerCallback

    from real.frameworks.transformers import follow

    class Checks(TrainerCallback):
        def on_save(self, args, state, control, model, **_):
            check_average(model, f"in the checkpoint of step {state.global_step}")

        def on_evaluate(self, args, state, control, model, **_):
            check_average(model, f"in the evaluation of step {state.global_step}")

    def train(resume_from: str | None) -> np.ndarray:
        module = Classifier()
        made = saving_trainer(module, folder, Checks(), every=3)
        follow(made, LocalSGD(period=4))
        made.train(resume_from_checkpoint=resume_from)
        return vector(module)

    whole = train(None)
    dist.barrier()
    check_equal(train(str(folder / "checkpoint-3")), whole)


def lightning_resumed(folder: Path) -> None:
    """Accumulates gradients over two passes, validates and saves between averages, and goes on from a checkpoint."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    steps = [*batches(n_steps=2 * N_STEPS)]

    class Task(net_task()):
        def training_step(self, _: int, number: int) -> Tensor:
            # A trainer that resumes knows the number, and begins its loader anew.
            return super().training_step(steps[number], number)

        def validation_step(self, _: int, number: int) -> None:
            check_average(self.net, "in a validation")

    def train(resume_from: Path | None) -> np.ndarray:
        task = Task()
        saves = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        made = cpu_trainer(
            LocalSGD(period=4),
            saves,
            max_steps=N_STEPS,
            accumulate_grad_batches=2,
            val_check_interval=6,
            num_sanity_val_steps=0,
            enable_checkpointing=True,
        )
        made.fit(task, DataLoader(range(2 * N_STEPS)), DataLoader(range(1)), ckpt_path=resume_from)
        return vector(task.net)

    connect()
    whole = train(None)
    dist.barrier()
    check_equal(train(folder / "step=3.ckpt"), whole)


def trainer_best(folder: Path) -> None:
    """Is stopped by a callback while an average of the schedule is under way, and loads its only checkpoint."""
    from safetensors.torch import load_file
    from transformers import TrainerCallback

    from real.frameworks.transformers import follow

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 3

    made = saving_trainer(Classifier(), folder, Stops(), every=2, load_best_model_at_end=True)
    follow(made, LocalSGD(period=3, overlap_steps=1))
    made.train()
    check_saved(load_file(folder / "checkpoint-2" / "model.safetensors"), made.model)


def check_saved(saved: Mapping[str, Tensor], module: nn.Module) -> None:
    """Check that a file has the parameters of a module, under their names."""
    check_equal(np.concatenate([saved[name].numpy().ravel() for name, _ in module.named_parameters()]), vector(module))


def lightning_streamed() -> None:
    """Accumulates over two passes, of a stream of five batches: the last pass of an epoch is alone."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([*batches(n_steps=5)])

    def train(loader: DataLoader) -> np.ndarray:
        task = net_task()()
        made = cpu_trainer(SCHEDULES["sync"], max_epochs=2, accumulate_grad_batches=2)
        made.fit(task, loader)
        assert made.global_step == 6
        return vector(task.net)

    connect()
    of_known_length = train(DataLoader([*batches(n_steps=5)], batch_size=None))
    check_equal(train(DataLoader(Stream(), batch_size=None)), of_known_length)


def lightning_monitored(folder: Path) -> None:
    """Saves by a metric that falls on rank 0 and rises on the others, after each validation."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Task(net_task()):
        n_validations = 0
        validated = np.empty(0)

        def validation_step(self, _: int, number: int) -> None:
            self.n_validations += 1
            self.validated = vector(self.net)
            self.log("metric", self.n_validations if dist.get_rank() else -self.n_validations)

    connect()
    task = Task()
    saves = ModelCheckpoint(folder, monitor="metric", filename="best")
    made = cpu_trainer(LocalSGD(period=4), saves, max_epochs=3, num_sanity_val_steps=0, enable_checkpointing=True)
    made.fit(task, DataLoader([*batches(n_steps=5)], batch_size=None), DataLoader(range(1)))
    dist.barrier()
    saved = torch.load(folder / "best.ckpt", weights_only=False)["state_dict"]
    found = np.concatenate([saved[f"net.{name}"].numpy().ravel() for name, _ in task.net.named_parameters()])
    check_equal(found, task.validated)


def lightning_without_callback() -> None:
    """Accumulates gradients in a network that was wrapped by hand."""

    class Task(net_task()):
        def on_train_start(self) -> None:
            self.end = real.wrap(self.net, self.optimizers(), LocalSGD(period=4)).close

    connect()
    made = cpu_trainer(None, max_steps=N_STEPS, accumulate_grad_batches=2)
    with pytest.raises(
        RunError, match=r"To accumulate gradients, do all passes but a step's last in `with worker.no_sync"
    ):
        made.fit(Task(), DataLoader([*batches(n_steps=2 * N_STEPS)], batch_size=None))


def accelerate_resumed(folder: Path) -> None:
    """Saves between averages, and goes on from there."""
    from accelerate import Accelerator

    from real.frameworks.accelerate import follow

    def train(resume_from: Path | None) -> np.ndarray:
        accelerator = Accelerator(cpu=True)
        module = mlp()
        optimizer = accelerator.prepare(torch.optim.SGD(module.parameters(), lr=0.1))
        model = follow(accelerator, module, optimizer, LocalSGD(period=4), resume_from=resume_from)
        for step, (inputs, targets) in enumerate(batches()):
            if step < model.step:
                continue
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            if step == 2 and resume_from is None:
                accelerator.save_state(folder)
                check_average(module, "in a checkpoint")
        model.close()
        return vector(module)

    whole = train(None)
    dist.barrier()
    check_equal(train(folder), whole)


def accelerate_model(folder: Path) -> None:
    """Saves the model only, between averages."""
    from accelerate import Accelerator
    from safetensors.torch import load_file

    from real.frameworks.accelerate import follow

    accelerator = Accelerator(cpu=True)
    module = mlp()
    optimizer = accelerator.prepare(torch.optim.SGD(module.parameters(), lr=0.1))
    model = follow(accelerator, module, optimizer, LocalSGD(period=4))
    for inputs, targets in batches(n_steps=3):
        optimizer.zero_grad()
        accelerator.backward(functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    accelerator.save_model(model, folder)
    check_average(module, "in a saved model")
    accelerator.wait_for_everyone()
    check_saved(load_file(folder / "model.safetensors"), module)
    model.close()


# --- all scripts of a tool in the same processes, as its import takes a second or two ---

OF_TOOL: dict[str, dict[str, Callable[[Path], None]]] = {
    "accelerate": {
        "sync": lambda _: accelerate("sync"),
        "resumed": accelerate_resumed,
        "model": accelerate_model,
    },
    "lightning": {
        "sync": lambda _: lightning("sync"),
        "local": lambda _: lightning("local"),
        "resumed": lightning_resumed,
        "streamed": lambda _: lightning_streamed(),
        "monitored": lightning_monitored,
        "without callback": lambda _: lightning_without_callback(),
    },
    "transformers": {
        "sync": lambda folder: trainer("sync", folder),
        "resumed": trainer_resumed,
        "best": trainer_best,
    },
}


def run_all(tool: str, folder: Path) -> None:
    for name, script in OF_TOOL[tool].items():
        script(folder / name)
        print(f"passed: {name}")
    leave_group()
