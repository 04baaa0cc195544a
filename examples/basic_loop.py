"""The basic loop: autocast around the forward pass, GradScaler around the rest.

Task: say which of two interleaved spiral arms a point lies on.

Rules to remember:
- The forward pass and the loss run inside autocast; backward, step and update run outside.
- Model and optimizer stay in float32: no `.half()`. autocast casts what an op takes.
- In each iteration: scale the loss, backward, `scaler.step(optimizer)`, `scaler.update()`.

Run: python examples/basic_loop.py
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"


def draw_points(count: int) -> tuple[Tensor, Tensor]:
    """Return points, (count, 2), and the arm of each, (count,), as 0.0 or 1.0."""
    arm = torch.randint(2, (count,), device=device).float()
    angle = 3 * math.pi * torch.rand(count, device=device).sqrt()
    turn = angle + math.pi * arm
    points = torch.stack([angle * turn.cos(), angle * turn.sin()], dim=1) / (3 * math.pi)
    return points + 0.01 * torch.randn_like(points), arm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1), nn.Flatten(0)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = GradScaler(device)

    for step in range(1, steps + 1):
        points, arm = draw_points(256)
        optimizer.zero_grad()
        with autocast(device_type=device, dtype=torch.float16):
            loss = F.binary_cross_entropy_with_logits(model(points), arm)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 1 or step % max(1, steps // 5) == 0:
            print(f"step {step:4}  loss {loss.item():.4f}  scale {scaler.get_scale():.0f}")

    points, arm = draw_points(1000)
    with torch.no_grad(), autocast(device_type=device, dtype=torch.float16):
        is_right = (model(points) > 0) == (arm > 0)
    print(f"result: {is_right.float().mean().item():.1%} of 1000 new points on the right arm")


if __name__ == "__main__":
    main()
