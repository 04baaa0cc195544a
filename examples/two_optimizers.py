"""Two models, two losses, two optimizers, one scaler: a GAN.

Task: the generator learns to put its points on a circle, from samples of the circle only.

Rules to remember:
- One scaler scales both losses, and `scaler.step` is called for each optimizer.
- `scaler.update()` once per iteration, after the last step: both steps then used the same scale.
- Each optimizer is checked by itself: an overflow in one model skips the step of that one only.

Run: python examples/two_optimizers.py
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, outputs)
    ).to(device)


def draw_circle(count: int) -> Tensor:
    """Return points on the circle of radius 1, (count, 2)."""
    angle = 2 * math.pi * torch.rand(count, device=device)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=800)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    generator, discriminator = mlp(4, 2), mlp(2, 1)
    adam = {"lr": 2e-3, "betas": (0.5, 0.99)}
    generator_optimizer = torch.optim.Adam(generator.parameters(), **adam)
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), **adam)
    scaler = GradScaler(device)

    for step in range(1, steps + 1):
        real = draw_circle(128)
        noise = torch.randn(128, 4, device=device)

        discriminator_optimizer.zero_grad()
        with autocast(device_type=device, dtype=torch.float16):
            fake = generator(noise)
            on_fake = discriminator(fake.detach())  # this loss is not the generator's
            loss = F.softplus(-discriminator(real)).mean() + F.softplus(on_fake).mean()
        scaler.scale(loss).backward()
        scaler.step(discriminator_optimizer)

        generator_optimizer.zero_grad()
        with autocast(device_type=device, dtype=torch.float16):
            loss = F.softplus(-discriminator(fake)).mean()
        scaler.scale(loss).backward()
        scaler.step(generator_optimizer)

        scaler.update()
        if step == 1 or step % max(1, steps // 5) == 0:
            off = (fake.detach().float().norm(dim=1) - 1).abs().mean()
            print(f"step {step:4}  off the circle by {off:.3f}  scale {scaler.get_scale():.0f}")

    with torch.no_grad(), autocast(device_type=device, dtype=torch.float16):
        fake = generator(torch.randn(1000, 4, device=device)).float()
    is_near = (fake.norm(dim=1) - 1).abs() < 0.2
    eighths = (4 * torch.atan2(fake[:, 1], fake[:, 0]) / math.pi).floor()[is_near].unique()
    print(f"result: {is_near.float().mean():.1%} near the circle, in {len(eighths)} eighths of 8")


if __name__ == "__main__":
    main()
