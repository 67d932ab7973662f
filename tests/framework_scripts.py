"""Scripts by Accelerate, Lightning and Hugging Face's Trainer, for ranks that are started as by torchrun.

Each trains twice, as the tool does it and wrapped, and prints the largest difference of the parameters.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from user_scripts import N_STEPS, SCHEDULES, Way, batches, mlp, vector

import real


def tell_difference(wrapped: np.ndarray, expected: np.ndarray) -> None:
    print("equal" if np.allclose(wrapped, expected, rtol=0, atol=1e-6) else np.abs(wrapped - expected).max())


def accelerate(way: str) -> None:
    """Accumulates and clips gradients."""
    from accelerate import Accelerator

    def train(own: bool) -> np.ndarray:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        module = mlp()
        optimizer = accelerator.prepare(torch.optim.AdamW(module.parameters(), lr=0.01))
        model = accelerator.prepare(module) if own else Way(way).connect(module, optimizer)
        for inputs, targets in batches(n_steps=2 * N_STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        if not own:
            model.close()
        return vector(module)

    tell_difference(train(own=False), train(own=True))
    dist.destroy_process_group()


def lightning(way: str) -> None:
    """Each rank has a trainer of one device. Lightning trains in the closure of `optimizer.step`."""
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor | None:
            if number == 1:
                return None  # all ranks leave this batch out
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_start(self) -> None:
            worker = real.wrap(self.net, self.optimizers(), SCHEDULES[way], n_steps=N_STEPS)
            self.end = worker.close  # a module would become a part of this one

        def on_train_end(self) -> None:
            self.end()

    dist.init_process_group("gloo")
    task = Task()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[LightningEnvironment()],
        max_steps=N_STEPS,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        **quiet,
    )
    trainer.fit(task, DataLoader([*batches()], batch_size=None))
    tell_difference(vector(task.net), by_torch("ddp" if way == "sync" else f"{way} by hand"))
    dist.destroy_process_group()


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


def trainer(way: str, folder: Path) -> None:
    """Trains in processes of a node. Accumulates and clips gradients."""
    from transformers import Trainer, TrainingArguments

    class WrappingTrainer(Trainer):
        def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
            return real.wrap(model, self.optimizer, SCHEDULES[way]) if training else model

    generator = torch.Generator().manual_seed(0)
    samples = [
        {"inputs": torch.randn(6, generator=generator), "labels": torch.randint(3, (), generator=generator)}
        for _ in range(240)
    ]

    def train(kind: type[Trainer]) -> np.ndarray:
        module = Classifier()
        made = kind(
            model=module,
            args=TrainingArguments(
                output_dir=str(folder),
                use_cpu=True,
                max_steps=N_STEPS,
                per_device_train_batch_size=5,
                gradient_accumulation_steps=2,
                learning_rate=0.01,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=samples,
        )
        made.train()
        if kind is WrappingTrainer:
            made.model_wrapped.close()
        return vector(module)

    wrapped = train(WrappingTrainer)
    tell_difference(wrapped, train(Trainer))
