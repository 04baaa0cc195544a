"""halfstep's scaler in the Trainer of transformers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.by_hand import recorded_by_itself, share_right
from torch import Tensor, nn

import halfstep

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from halfstep.integrations.accelerate import use_scaler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

BAD = 5
"""The sample with NaN."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(8, 1)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.net(x)
        self.dtypes.add(y.dtype)
        return {"loss": (y.float() - labels).square().mean(), "logits": y}


def trainer_of(folder: Path, kind: Any = transformers.Trainer, **options: Any) -> Any:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    x[BAD] = math.nan
    arguments = transformers.TrainingArguments(
        str(folder),
        **{
            "fp16": True,
            "use_cpu": True,
            "max_steps": 8,
            "per_device_train_batch_size": 4,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            **options,
        },
    )
    data = [{"x": each, "labels": torch.ones(1)} for each in x]
    return kind(Model(), arguments, train_dataset=data)


class Scaled(transformers.Trainer):
    """A Trainer each of whose Accelerators has a scaler, as docs/integrations.md has it."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_scaler(self.accelerator, halfstep.GradScaler(init_scale=256.0))


def test_trains_in_float16_and_skips(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, optim="adamw_torch")
    scaler = use_scaler(trainer.accelerator, halfstep.GradScaler(init_scale=256.0))
    trainer.train()
    assert trainer.model.dtypes == {torch.float16}
    counts = scaler.counts()
    assert (counts.taken, counts.skipped) == (6, 2)  # two epochs, in each of them one bad batch
    assert scaler.get_scale() == 128.0  # the last batch was NaN; the next step restores the scale
    assert all(param.isfinite().all() for param in trainer.model.parameters())
    assert trainer.lr_scheduler.last_epoch == 6  # that waits for steps that are taken


def test_a_search_for_hyperparameters_keeps_the_scaler(tmp_path: Path) -> None:
    """Each trial makes an Accelerator; so do these two calls of what a search does."""
    for kind, dtype in ((Scaled, torch.float16), (transformers.Trainer, torch.float32)):
        trainer = trainer_of(tmp_path, kind, optim="adamw_torch")
        first = trainer.accelerator
        if kind is transformers.Trainer:
            use_scaler(trainer.accelerator)
        trainer.create_accelerator_and_postprocess()
        assert trainer.accelerator is not first
        trainer.train()
        assert trainer.model.dtypes == {dtype}
        if kind is Scaled:
            counts = trainer.accelerator.scaler.counts()
            assert (counts.taken, counts.skipped) == (6, 2)


def test_a_fused_optimizer_hides_its_skips(tmp_path: Path) -> None:
    """What the docs say of it; fails when accelerate sees them."""
    trainer = trainer_of(tmp_path)  # fused by default
    scaler = use_scaler(trainer.accelerator, halfstep.GradScaler(init_scale=256.0))
    trainer.train()
    assert (scaler.counts().taken, trainer.lr_scheduler.last_epoch) == (6, 8)


def test_a_checkpoint_resumes(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=4)
    use_scaler(trainer.accelerator, halfstep.GradScaler(init_scale=256.0))
    trainer.train()
    again = trainer_of(tmp_path, max_steps=12)
    scaler = use_scaler(again.accelerator)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert scaler.get_scale() == 256.0
    assert scaler.counts().taken == 9


def test_bfloat16_with_a_guard(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, fp16=False, bf16=True)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.01)
    guarded = halfstep.guard(optimizer, on_skips=lambda report: None)
    trainer.optimizer = optimizer
    trainer.train()
    assert (guarded.counts().taken, guarded.counts().skipped) == (6, 2)
    assert all(param.isfinite().all() for param in trainer.model.parameters())


def test_the_example(tmp_path: Path) -> None:
    printed, run = recorded_by_itself("transformers_digits", "--steps 60", tmp_path)
    skipped = [step for step in run.steps if not step.taken]
    assert len(skipped) in (2, 3)  # one in each epoch of 24 steps
    assert all(step.reason == "loss" for step in skipped)
    assert share_right(printed) > 0.8
