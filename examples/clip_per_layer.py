"""Clipping each layer by its own norm, so that one wild layer does not silence the others.

Task: an autoencoder that squeezes waves of 32 samples into 4 numbers.

Rules to remember:
- `scaler.unscale_(optimizer)` once, before the first norm is taken; then clip as you like.
- Each layer is clipped by the norm of its own parameters only. An overflow in one layer (norm inf)
  skips the step of all.
- Read, log or change gradients between `unscale_` and `step`: there they are real.

Run: python examples/clip_per_layer.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
MAX_NORM = 1.0


def draw_waves(count: int) -> Tensor:
    """Return sine waves of random frequency, phase and size, (count, 32)."""
    frequency, phase, size = torch.rand(3, count, 1, device=device)
    time = torch.linspace(0, 1, 32, device=device)
    return 10 * (0.5 + size) * torch.sin(6 * (0.5 + frequency) * time + 6 * phase)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64),
        nn.SiLU(),
        nn.Linear(64, 4),
        nn.Linear(4, 64),
        nn.SiLU(),
        nn.Linear(64, 32),
    ).to(device)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = GradScaler(device)

    for step in range(1, steps + 1):
        waves = draw_waves(256)
        optimizer.zero_grad()
        with autocast(device_type=device, dtype=torch.float16):
            loss = F.mse_loss(model(waves), waves)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms = {
            name: torch.nn.utils.clip_grad_norm_(layer.parameters(), MAX_NORM)
            for name, layer in layers.items()
        }
        scaler.step(optimizer)
        scaler.update()

        if step == 1 or step % max(1, steps // 5) == 0:
            by_layer = "  ".join(f"{name}: {norm:.3f}" for name, norm in norms.items())
            print(f"step {step:4}  loss {loss.item():.4f}  norms before clipping  {by_layer}")

    waves = draw_waves(1000)
    with torch.no_grad(), autocast(device_type=device, dtype=torch.float16):
        error = F.mse_loss(model(waves), waves).item()
    print(f"result: {1 - error / waves.var().item():.1%} of the variance goes through 4 numbers")


if __name__ == "__main__":
    main()
