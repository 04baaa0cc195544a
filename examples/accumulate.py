"""Gradient accumulation: a batch too large for the memory, in parts, with one step.

Task: learn the height of a ripple on a pond from the place.

Rules to remember:
- Divide the loss of each part by their number, then scale it: the gradients add up to the average.
- `scaler.step` and `scaler.update` once per window, after its last part. The scale must stay the
  same as long as gradients add up, or parts in different units are mixed.
- Clipping, if any: `scaler.unscale_` after the last part, never between parts.

Run: python examples/accumulate.py
and with --parts 1: the same run with whole batches.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"


def draw_places(count: int) -> tuple[Tensor, Tensor]:
    """Return places, (count, 2), and the height at each, (count, 1)."""
    places = 2 * torch.rand(count, 2, device=device) - 1
    return places, torch.cos(8 * places.norm(dim=1, keepdim=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600, help="steps of the optimizer")
    parser.add_argument("--parts", type=int, default=4, help="parts of a batch of 256")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = GradScaler(device)

    for step in range(1, options.steps + 1):
        places, heights = draw_places(256)
        optimizer.zero_grad()
        batch_loss = torch.zeros((), device=device)
        for part, wanted in zip(
            places.chunk(options.parts), heights.chunk(options.parts), strict=True
        ):
            with autocast(device_type=device, dtype=torch.float16):
                loss = F.mse_loss(model(part), wanted) / options.parts
            scaler.scale(loss).backward()  # adds to the gradients of the parts before
            batch_loss += loss.detach()
        scaler.step(optimizer)
        scaler.update()

        if step == 1 or step % max(1, options.steps // 5) == 0:
            print(f"step {step:4}  loss {batch_loss.item():.4f}  scale {scaler.get_scale():.0f}")

    places, heights = draw_places(1000)
    with torch.no_grad(), autocast(device_type=device, dtype=torch.float16):
        error = F.mse_loss(model(places), heights).item()
    print(f"result: squared error {error:.4f}; predicting the mean: {heights.var():.4f}")


if __name__ == "__main__":
    main()
