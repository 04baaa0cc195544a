"""Master weights in loops that libraries own: their steps, closures, checkpoints, averages.

A library that is not installed is skipped.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import seeded
from tests.scaler.containers import Parts
from tests.training import assert_same, loss_of, mlp, take_step
from torch import Tensor, nn

from halfstep import GradScaler, float32_weights, lost_updates, master_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
BF16 = torch.bfloat16
DATA = torch.randn(32, 8, generator=seeded(0)).bfloat16()


@pytest.fixture(autouse=True)
def environment_and_seeds_stay() -> Iterator[None]:
    before = dict(os.environ)
    with torch.random.fork_rng():
        yield
    os.environ.clear()
    os.environ.update(before)


def trained_by_hand(steps: int, make: Callable[[Any], torch.optim.Optimizer]) -> nn.Sequential:
    """Return a bfloat16 network whose float32 weights are stepped, batches of 4 in order."""
    model = mlp(8, 16, 4).to(BF16)
    weights = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = make(weights)
    for step in range(steps):
        model.zero_grad()
        loss_of(model, DATA[4 * step : 4 * step + 4]).backward()
        for param, weight in zip(model.parameters(), weights, strict=True):
            weight.grad = param.grad.float()
        optimizer.step()
        for param, weight in zip(model.parameters(), weights, strict=True):
            upper = (weight.detach().view(torch.int32) + 0x8000) >> 16
            param.data.copy_(upper.to(torch.int16).view(BF16))
    return model


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    assert_same(ours.parameters(), theirs.parameters())
    assert all(param.dtype is BF16 for param in ours.parameters())


# --- lightning ------------------------------------------------------------------------------------


def fitted(make: Callable[[Any], torch.optim.Optimizer], **kwargs: Any) -> tuple[Any, Any]:
    """Return a module that the Trainer of lightning has trained in bfloat16, and the Trainer."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(8, 16, 4)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            assert self.net[0].weight.dtype is BF16
            return loss_of(self.net, batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return master_weights(make(self.parameters()))

    resumed = {key: kwargs.pop(key) for key in ("ckpt_path", "weights_only") if key in kwargs}
    quiet = {f"enable_{each}": False for each in ("progress_bar", "model_summary")}
    trainer = lightning.Trainer(
        precision="bf16-true", accelerator="cpu", logger=False, **quiet, **kwargs
    )
    data = torch.utils.data.TensorDataset(DATA)
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), **resumed)
    return module, trainer


def test_lightning() -> None:
    module, _ = fitted(adamw, max_steps=8, enable_checkpointing=False)
    assert_same_weights(module.net, trained_by_hand(8, adamw))


def test_lightning_with_lbfgs_and_several_batches_a_step() -> None:
    module, trainer = fitted(
        lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
        max_steps=3,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
    )
    assert module.net[0].weight.dtype is BF16
    assert trainer.optimizers[0].state[module.net[0].weight]["master_remainder"].any()


def test_lightning_resumes(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    save = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole, _ = fitted(adamw, max_epochs=2, callbacks=[save])
    again, _ = fitted(
        adamw,
        max_epochs=2,
        enable_checkpointing=False,
        ckpt_path=tmp_path / "epoch=0.ckpt",
        weights_only=False,
    )
    assert_same_weights(whole.net, again.net)


# --- transformers, accelerate, peft ---------------------------------------------------------------


def language_model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(BF16)


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_a_trainer_resumes(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(0, 32, (32, 8), generator=seeded(0))
    data = [{"input_ids": each, "labels": each} for each in tokens]

    def trained(resumed: str | None = None) -> nn.Module:
        model = language_model()
        if kind == "AdamW":
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        else:
            fixed = {"relative_step": False, "scale_parameter": False}
            from transformers.optimization import Adafactor

            optimizer = Adafactor(model.parameters(), lr=1e-3, **fixed)
        master_weights(optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model, args, train_dataset=data, optimizers=(optimizer, scheduler)
        )
        trainer.train(resume_from_checkpoint=resumed)
        assert all("master_remainder" in each for each in optimizer.state.values())
        return model  # type: ignore[no-any-return]

    assert_same_weights(trained(), trained(str(tmp_path / "checkpoint-2")))


def test_optimizers_in_a_container() -> None:
    """Its own state is not what it saves: each of those that it holds has master weights."""
    model = mlp(8, 16, 4).to(BF16)
    container = Parts([adamw(model[0].parameters()), adamw(model[2].parameters())])
    with pytest.raises(TypeError, match=r"it holds several optimizers.*Pass each of them"):
        master_weights(container)
    for optimizer in container.each():
        master_weights(optimizer)
    scaler = GradScaler(init_scale=2.0**10)
    for step in range(8):
        take_step(scaler, container, loss_of(model, DATA[4 * step : 4 * step + 4]))
    assert_same_weights(model, trained_by_hand(8, adamw))


@pytest.mark.parametrize("first", ["masters", "accelerate"])
def test_accelerate(first: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = mlp(8, 16, 4).to(BF16)
    optimizer = adamw(model.parameters())
    if first == "masters":
        master_weights(optimizer)
    model, prepared = accelerator.prepare(model, optimizer)
    if first == "accelerate":
        with pytest.raises(TypeError, match="Pass the optimizer that it wraps"):
            master_weights(prepared)
        master_weights(prepared.optimizer)

    def steps(numbers: range) -> None:
        for step in numbers:
            prepared.zero_grad()
            accelerator.backward(loss_of(model, DATA[4 * step : 4 * step + 4]))
            prepared.step()

    steps(range(4))
    accelerator.save_state(str(tmp_path))
    steps(range(6))
    accelerator.load_state(str(tmp_path))
    steps(range(4, 8))
    assert_same_weights(model, trained_by_hand(8, adamw))
    # What the library made of the optimizer is as good as the optimizer.
    weights = float32_weights(model, prepared)
    assert all(map(torch.equal, weights.values(), float32_weights(model, optimizer).values()))
    with lost_updates(prepared, model) as lost:
        prepared.step()
    assert lost.share < 0.01


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["0", "2"])
    model = peft.get_peft_model(mlp(8, 16, 4).to(BF16), config, autocast_adapter_dtype=False)
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = master_weights(torch.optim.AdamW(adapters, lr=1e-2))
    for step in range(6):
        if step == 3:
            model.merge_adapter()
            model.unmerge_adapter()
        optimizer.zero_grad()
        loss_of(model, DATA[4 * step : 4 * step + 4]).backward()
        optimizer.step()
    assert all(param.dtype is BF16 for param in adapters)
    assert all(optimizer.state[param]["master_remainder"].any() for param in adapters)
    before = model(DATA)
    torch.testing.assert_close(model.merge_and_unload()(DATA), before, atol=0.1, rtol=0)


# --- averages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["torch_ema", "ema_pytorch", "diffusers"])
def test_averages_that_stand_in_for_the_weights(library: str) -> None:
    """Between two steps the weights are an average, and then those that are trained again."""
    imported = pytest.importorskip(library)
    model = mlp(8, 16, 4).to(BF16)
    optimizer = master_weights(adamw(model.parameters()))
    params = list(model.parameters())
    if library == "diffusers":
        average: Any = pytest.importorskip("diffusers.training_utils").EMAModel(params)
    elif library == "ema_pytorch":
        average = imported.EMA(model, update_after_step=0, update_every=1)
    else:
        average = imported.ExponentialMovingAverage(params, 0.9)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, DATA[4 * step : 4 * step + 4]).backward()
        optimizer.step()
        if library == "diffusers":
            average.step(params)
            average.store(params)
            average.copy_to(params)
            average.restore(params)
        elif library == "ema_pytorch":
            average.update()
        else:
            average.update()
            with average.average_parameters():
                model(DATA)
    assert_same_weights(model, trained_by_hand(8, adamw))
