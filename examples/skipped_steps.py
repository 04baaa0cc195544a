"""Skipped steps: see why, whose gradients, retry the batch, and gate what follows a step.

Task: fit a wave. Some batches are broken: one holds NaN, one makes the gradients overflow.

Rules to remember:
- `GradScaler(module=model)` knows the names of the parameters, and so does what it says.
- `scaler.outcome(optimizer)` after each step: taken or skipped, the reason, the norm, the culprits.
- `scaler.retry(optimizer)` around the iteration runs a batch that overflowed again at the smaller
  scale, with the same random numbers. A batch with NaN is given up after these times.
- What follows a step waits for one that was taken: `if scaler.outcome(optimizer).taken:`.

Run: python examples/skipped_steps.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"


def draw_points(step: int) -> tuple[Tensor, Tensor]:
    """Return x and sin(4 x), both (256, 1), broken now and then."""
    x = 4 * torch.rand(256, 1, device=device) - 2
    y = torch.sin(4 * x)
    if step % 50 == 20:
        y[0] = torch.nan
    if step % 50 == 40:
        y *= 30  # the gradients are too large for float16 at the present scale
    return x, y


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.02), nn.Linear(64, 1)).to(
        device
    )
    average = AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = GradScaler(device, module=model)

    for step in range(1, steps + 1):
        x, y = draw_points(step)
        for attempt in scaler.retry(optimizer, times=6):
            attempts = attempt + 1
            optimizer.zero_grad()
            with autocast(device_type=device, dtype=torch.float16):
                loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()

        outcome = scaler.outcome(optimizer)
        if outcome.taken:
            scheduler.step()
            average.update_parameters(model)
        if outcome.skipped:
            culprits = ", ".join(outcome.culprits[:2])
            print(f"step {step:4}  skipped, {outcome.reason}: {culprits}")
        elif attempts > 1:
            print(f"step {step:4}  taken at attempt {attempts}, scale {outcome.scale:.0f}")
        elif step == 1 or step % max(1, steps // 10) == 5:
            print(f"step {step:4}  loss {loss.item():.4f}  norm {outcome.norm:.3f}")

    taken, skipped, *_ = scaler.counts()
    print(f"result: {taken} steps taken, {skipped} skipped, schedule at {scheduler.last_epoch}")


if __name__ == "__main__":
    main()
