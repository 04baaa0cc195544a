"""Training step that can be rebuilt from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from tests.device import DEVICE
from tests.diagnose import gpt, losses, models
from torch import Tensor, nn

import halfstep

MODELS: dict[str, type[nn.Module]] = {
    "mlp": models.MLP,
    "mlp in place": models.InPlaceMLP,
    "cnn": models.CNN,
    "gpt": gpt.GPT,
    "gpt fused": gpt.FusedGPT,
    "recurrent": models.Recurrent,
    "lstm": models.LSTM,
    "autoencoder": models.Autoencoder,
}
CLASSES = {"cnn", "gpt", "gpt fused"}  # their loss is a cross-entropy


@dataclass(frozen=True)
class Setting:
    """Everything that a step is made from.

    ``again``: checkpointing. ``scale`` None: no scaler. ``takes``: the step ends with that of the
    optimizer. ``clips``: gradients are unscaled and clipped. ``dtype`` float32: no autocast.
    ``plain``: autocast and the scaler are PyTorch's. ``outside``: the loss is outside of autocast.
    """

    model: str
    seed: int
    width: int = 16
    depth: int = 2
    batch: int = 4
    again: models.Again = "no"
    micro_batches: int = 1
    scale: float | None = 1024.0
    takes: bool = False
    clips: bool = False
    mask: str = "fill"
    plain: bool = False
    dtype: torch.dtype = torch.float16
    policy: str | None = None
    loss: losses.Loss | None = None
    outside: bool = False


@dataclass(eq=False)
class Training:
    """A model, its batches, and the step."""

    setting: Setting
    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    optimizer: torch.optim.Optimizer
    scaler: halfstep.GradScaler | torch.amp.GradScaler
    losses: list[float] = field(default_factory=list)

    def step(self) -> None:
        here = self.setting
        loss_of = here.loss or (losses.classes if here.model in CLASSES else losses.distance)
        self.optimizer.zero_grad()
        self.losses.clear()
        for x, y in self.batches:
            with _autocast(here, self.model):
                out = self.model(x)
                if not here.outside:
                    loss = loss_of(out, y)
            if here.outside:
                loss = loss_of(out, y)
            self.scaler.scale(loss / len(self.batches)).backward()
            self.losses.append(loss.item())
        if here.clips:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if here.takes:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def is_finite(self) -> bool:
        """Run the step and look at the losses and the gradients."""
        self.step()
        return self.was_finite()

    def was_finite(self) -> bool:
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        return all(map(math.isfinite, self.losses)) and all(
            bool(g.isfinite().all()) for g in gradients
        )


def armed(setting: Setting, arm: Callable[[Training], object] = lambda training: None) -> Training:
    """Make the training from its seed, then put the fault into it."""
    torch.manual_seed(setting.seed)
    model = MODELS[setting.model](setting.width, setting.depth, setting.again)
    batches = [_batch(setting) for _ in range(setting.micro_batches)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    enabled = setting.scale is not None
    if setting.plain:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=setting.scale or 1.0, enabled=enabled)
    else:
        scaler = halfstep.GradScaler(
            DEVICE, init_scale=setting.scale or 1.0, enabled=enabled, on_skips=lambda report: None
        )
    for module in model.modules():
        if isinstance(module, gpt.Attention):
            module.mask = setting.mask
    training = Training(setting, model, batches, optimizer, scaler)
    arm(training)
    torch.manual_seed(setting.seed + 1)
    return training


def largest_scale(setting: Setting, arm: Callable[[Training], object]) -> float:
    """Return the largest power of two that is finite as the scale of the loss."""
    scale = 2.0**30
    while scale > 1 and not armed(replace(setting, scale=scale), arm).is_finite():
        scale /= 2
    return scale


def _autocast(setting: Setting, model: nn.Module) -> AbstractContextManager[object]:
    is_on = setting.dtype is not torch.float32
    dtype = setting.dtype if is_on else torch.bfloat16
    if setting.plain and setting.policy is None:
        return torch.autocast(DEVICE, dtype, enabled=is_on)
    module = setting.policy and model
    return halfstep.autocast(DEVICE, dtype, enabled=is_on, policy=setting.policy, module=module)


def _batch(setting: Setting) -> tuple[Tensor, Tensor]:
    n = setting.batch
    match setting.model:
        case "cnn":
            return torch.randn(n, 3, 8, 8), torch.randint(4, (n,))
        case "gpt" | "gpt fused":
            tokens = torch.randint(20, (n, gpt.CONTEXT + 1))
            return tokens[:, :-1], tokens[:, 1:]
        case "recurrent" | "lstm":
            return torch.randn(n, 5, 5), torch.randn(n, 4)
        case "autoencoder":
            x = torch.randn(n, 12)
            return x, x.clone()  # two tensors have two names
        case _:
            return torch.randn(n, 12), torch.randn(n, 4)
