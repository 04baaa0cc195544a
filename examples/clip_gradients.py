"""Gradient clipping: `unscale_` first, so that the norm is that of the real gradients.

Task: fit a wave, with targets of which some are far off; their gradients would throw the model out.

Rules to remember:
- After backward the gradients are multiplied by the scale, 65536 at first. Clipping them to norm 1
  would leave steps of about 1/65536, and training that looks stuck: `scaler.unscale_` comes first.
- `unscale_` once per optimizer and step; `scaler.step` then knows that it is done.
- An overflow makes the norm inf or NaN. No need to look: `scaler.step` skips that step.

Run: python examples/clip_gradients.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
MAX_NORM = 1.0


def draw_points(count: int) -> tuple[Tensor, Tensor]:
    """Return x and sin(4 x), both (count, 1)."""
    x = 4 * torch.rand(count, 1, device=device) - 2
    return x, torch.sin(4 * x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=800)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    scaler = GradScaler(device)

    for step in range(1, steps + 1):
        x, y = draw_points(256)
        if step % 10 == 0:
            y[:4] += 100  # a bad batch
        optimizer.zero_grad()
        with autocast(device_type=device, dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)  # before clipping
        scaler.step(optimizer)
        scaler.update()

        every = max(10, steps // 50 * 10)
        if step == 1 or step % every in (0, every - 1):
            scale = scaler.get_scale()
            print(f"step {step:4}  loss {loss.item():8.4f}  norm {norm:8.3f}  scale {scale:.0f}")

    x, y = draw_points(1000)
    with torch.no_grad(), autocast(device_type=device, dtype=torch.float16):
        error = F.mse_loss(model(x), y).item()
    print(f"result: squared error {error:.4f} on clean points; predicting 0: {y.var():.4f}")


if __name__ == "__main__":
    main()
