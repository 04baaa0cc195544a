"""Losses that depend on the scale, beside torch.amp: they are not finite while it is too large.

Each program computes gradients of a scaled loss, divides them by the scale, and uses them in the
loss that it steps with. In float16 they overflow at the first scale, and so does that loss.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.device import DEVICE, seeded
from tests.training import mlp, quiet
from torch import Tensor, nn
from torch.func import functional_call

from halfstep._scaler.scale_state import Dynamic

NUM_STEPS = 200


def fp16() -> torch.autocast:
    return torch.autocast(DEVICE, torch.float16)


class Program:
    """A training loop, whose ``loss`` is that of one iteration.

    The outputs are multiplied by 32, so that scaled gradients overflow float16 above some 2^10.
    """

    learning_rate = 1e-3

    def __init__(self, scaler: Any) -> None:
        self.scaler, self.model = scaler, mlp(8, 16, 1)
        self.generator = seeded(1)

    def outputs(self, x: Tensor, params: dict[str, Tensor] | None = None) -> Tensor:
        with fp16():
            y = self.model(x) if params is None else functional_call(self.model, params, (x,))
            return y * 32

    def fit(self, x: Tensor, params: dict[str, Tensor] | None = None) -> Tensor:
        return (self.outputs(x, params).float() - 32 * x[:, :1]).square().mean()

    def gradients(self, loss: Tensor, inputs: Any, create_graph: bool = True) -> list[Tensor]:
        scaled = torch.autograd.grad(
            self.scaler.scale(loss), inputs, torch.ones_like(loss), create_graph=create_graph
        )
        return [each / self.scaler.get_scale() for each in scaled]

    def loss(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def losses_of_taken_steps(
        self, num_steps: int = NUM_STEPS, nan_at: tuple[int, ...] = ()
    ) -> list[float]:
        """Return the loss of every taken step."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.learning_rate)
        taken = []
        for step in range(num_steps):
            x = torch.randn(16, 8, generator=self.generator)
            if step in nan_at:
                x[0] = math.nan
            optimizer.zero_grad()
            loss = self.loss(x)
            self.scaler.scale(loss).backward()
            before = [param.detach().clone() for param in self.model.parameters()]
            self.scaler.step(optimizer)
            self.scaler.update()
            if not all(map(torch.equal, before, self.model.parameters())):
                taken.append(loss.item())
        return taken


class GradientPenalty(Program):
    """The example in PyTorch's documentation."""

    learning_rate = 1e-5

    def loss(self, x: Tensor) -> Tensor:
        loss = self.fit(x)
        gradients = self.gradients(loss, list(self.model.parameters()))
        return loss + torch.stack([each.square().sum() for each in gradients]).sum().sqrt()


class R1(Program):
    """The penalty of a discriminator on real images, and that of StyleGAN2-like projects."""

    def loss(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        score = self.outputs(x)
        (gradient,) = self.gradients(score, [x])
        return nn.functional.softplus(-score.float()).mean() + gradient.square().sum(1).mean()


class WGAN(Program):
    """The penalty on points between real and generated data."""

    learning_rate = 1e-6

    def loss(self, x: Tensor) -> Tensor:
        middle = (x * torch.rand(len(x), 1, generator=self.generator)).requires_grad_()
        (gradient,) = self.gradients(self.outputs(middle), [middle])
        return self.outputs(x).float().mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()


class MAML(Program):
    """A loss after one inner step, through which it is differentiated."""

    learning_rate = 1e-5

    def loss(self, x: Tensor) -> Tensor:
        params = dict(self.model.named_parameters())
        gradients = self.gradients(self.fit(x[:8]), list(params.values()))
        moved = {
            name: param - 1e-5 * each
            for (name, param), each in zip(params.items(), gradients, strict=True)
        }
        return self.fit(x[8:], moved)


class PathLength(Program):
    """StyleGAN2's penalty, with its running mean."""

    mean = 0.0

    def loss(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        noise = torch.randn(len(x), 1, generator=self.generator)
        (gradient,) = self.gradients((self.outputs(x) * noise).sum(), [x])
        lengths = gradient.square().sum(1).sqrt()
        if bool(lengths.isfinite().all()):
            self.mean += 0.01 * (lengths.detach().mean().item() - self.mean)
        return (lengths - self.mean).square().mean()


class Adversarial(Program):
    """Batches that a gradient step has made worse: no second derivative."""

    learning_rate = 1e-5

    def loss(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        (gradient,) = self.gradients(self.fit(x), [x], create_graph=False)
        return self.fit((x + 0.1 * gradient / gradient.norm()).detach())


class SAM(Program):
    """The loss at weights that a step of length 0.05 has moved uphill."""

    learning_rate = 1e-5

    def loss(self, x: Tensor) -> Tensor:
        params = dict(self.model.named_parameters())
        gradients = self.gradients(self.fit(x), list(params.values()), create_graph=False)
        norm = torch.stack([each.norm() for each in gradients]).norm()
        moves = zip(params.items(), gradients, strict=True)
        return self.fit(x, {name: param + 0.05 * each / norm for (name, param), each in moves})


class ScaledForward(Program):
    """A term that the forward pass already multiplies by the scale, in float16."""

    learning_rate = 1e-5

    def loss(self, x: Tensor) -> Tensor:
        scale = self.scaler.get_scale()
        return self.fit(x) + (self.outputs(x).half() * scale).float().div(scale).square().mean()


programs = pytest.mark.parametrize(
    "make", [GradientPenalty, R1, WGAN, MAML, PathLength, Adversarial, SAM, ScaledForward]
)


@programs
def test_it_trains_as_under_torch(make: Callable[[Any], Program]) -> None:
    theirs = make(torch.amp.GradScaler(DEVICE, growth_interval=80))
    mine = make(quiet(growth_interval=80))
    losses = mine.losses_of_taken_steps()
    expected = theirs.losses_of_taken_steps()
    assert len(expected) < NUM_STEPS - 1  # or the program shows nothing
    assert len(losses) >= len(expected) - 3
    assert sum(losses[-20:]) < sum(losses[:20])
    torch.testing.assert_close(losses[-1], expected[-1], rtol=0.2, atol=0)


@pytest.mark.parametrize("make", [GradientPenalty, MAML, Adversarial])
def test_nan_batches_do_not_cost_it_the_scale(make: Callable[[Any], Program]) -> None:
    clean, mine = make(quiet()), make(quiet())
    clean.losses_of_taken_steps(50)
    mine.losses_of_taken_steps(50, nan_at=(20, 30, 31, 32, 40, 45))
    assert mine.scaler.get_scale() >= clean.scaler.get_scale()


def test_a_schedule_without_trials() -> None:
    mine = GradientPenalty(quiet(schedule=Dynamic(trials=False)))
    assert len(mine.losses_of_taken_steps()) > 180
