"""Libraries that write to weights, for real: no result is that of the weights as they were.

Most of them write through ``.data``. A library that is not installed is skipped: the extra ``dev``
has all but timm, which needs torchvision (its averages are one file, that needs PyTorch alone).
"""

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE, seeded
from torch import Tensor, nn
from torch.utils.data import DataLoader

from halfstep._autocast import autocast, hold_casts, weight_cache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of theirs
]
X = torch.randn(4, 8, generator=seeded(0))


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "SMALL", 0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def moved(model: nn.Module) -> None:
    """Stand in for training: far from what the model was."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param))


def result(model: nn.Module) -> Tensor:
    with torch.no_grad(), autocast(DEVICE, torch.bfloat16):
        out: Tensor = model(X)
    return out


def used(model: nn.Module) -> None:
    for _ in range(3):
        result(model)


def check(model: nn.Module, before: Tensor) -> None:
    """Compare a model that was written to with a copy that nobody has used."""
    now = result(model)
    assert torch.equal(now, result(copy.deepcopy(model)))
    assert not torch.equal(now, before)


# Each takes a model, and yields it before and after every write.
def by_peft() -> Iterator[nn.Module]:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(network(), config)
    yield model
    model.base_model.merge_adapter()
    model.base_model.disable_adapter_layers()  # so that only the merged weights count
    yield model
    model.base_model.enable_adapter_layers()
    yield model.merge_and_unload()


def by_ema_pytorch() -> Iterator[nn.Module]:
    library = pytest.importorskip("ema_pytorch")
    model = network()
    ema = library.EMA(model, beta=0.5, update_after_step=0, update_every=1)
    yield ema.ema_model
    for _ in range(3):
        moved(model)
        ema.update()
    yield ema.ema_model
    ema.update_model_with_ema(0.5)


def by_torch_ema() -> Iterator[nn.Module]:
    library = pytest.importorskip("torch_ema")
    model = network()
    ema = library.ExponentialMovingAverage(model.parameters(), decay=0.5)
    yield model
    moved(model)
    ema.update()
    yield model
    with ema.average_parameters():
        yield model
    yield model


def by_diffusers() -> Iterator[nn.Module]:
    library = pytest.importorskip("diffusers.training_utils")
    model = network()
    ema = library.EMAModel(model.parameters(), decay=0.5)
    yield model
    for _ in range(3):
        moved(model)
        ema.step(model.parameters())
    yield model
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    yield model
    ema.restore(model.parameters())
    yield model


def by_timm() -> Iterator[nn.Module]:
    model = network()
    for name in ("ModelEmaV2", "ModelEmaV3"):
        ema = getattr(timm_averages(), name)(model, decay=0.5)
        yield ema.module
        for _ in range(2):
            moved(model)
            ema.update(model)
            yield ema.module


def timm_averages() -> ModuleType:
    package = importlib.util.find_spec("timm")
    if package is None or package.origin is None:
        pytest.skip("timm is not installed: pip install --no-deps timm")
    path = package.origin.replace("__init__.py", "utils/model_ema.py")
    spec = importlib.util.spec_from_file_location("timm_model_ema", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["timm_model_ema"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_pytorch() -> Iterator[nn.Module]:
    model = network()
    average = torch.optim.swa_utils.AveragedModel(model)
    yield average
    for _ in range(2):
        moved(model)
        average.update_parameters(model)
        yield average


LIBRARIES: dict[str, Callable[[], Iterator[nn.Module]]] = {
    "peft": by_peft,
    "ema_pytorch": by_ema_pytorch,
    "torch_ema": by_torch_ema,
    "diffusers": by_diffusers,
    "timm": by_timm,
    "pytorch": by_pytorch,
}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_cast_is_stale_after(library: str, held: bool) -> None:
    before, holds, writes = torch.zeros(()), [], 0
    for model in LIBRARIES[library]():
        if held:
            holds.append(hold_casts(model))
        check(model, before)
        before = result(model)
        used(model)
        writes += 1
    assert writes >= 3 or library == "ema_pytorch"
    for hold in holds:
        hold.release()


@pytest.mark.parametrize("held", [False, True])
def test_no_cast_is_stale_under_the_averages_of_lightning(held: bool, tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")

    class Trained(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, cache_enabled: bool) -> None:
            super().__init__()
            self.network, self.cache_enabled = network(), cache_enabled
            self.losses: list[float] = []

        def loss(self) -> Tensor:
            with autocast(DEVICE, torch.bfloat16, cache_enabled=self.cache_enabled):
                return F.mse_loss(self.network(X).float(), X)

        def training_step(self, batch: Tensor) -> Tensor:
            return self.loss() + 0 * self.loss()  # the second use is of a kept cast

        def validation_step(self, batch: Tensor) -> None:
            self.losses.append(self.loss().item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

        def train_dataloader(self) -> DataLoader[int]:
            return DataLoader(range(2))  # type: ignore[arg-type]

        val_dataloader = train_dataloader

    losses = []
    for cache_enabled in (True, False):
        model = Trained(cache_enabled)
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            callbacks=[callbacks.EMAWeightAveraging(decay=0.5)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        with hold_casts(model) if held and cache_enabled else nullcontext() as hold:
            trainer.fit(model)
            assert hold is None or hold.info().hits > 0
        losses.append(model.losses)
    assert losses[0] == losses[1]
    assert len(set(losses[0])) > 2
