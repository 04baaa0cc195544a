"""A model with two parts that float16 cannot hold, for `halfstep.tune` to find.

Task: tell from a short signal, in volts, how strong it is and where in its period it begins.

Rules to remember:
- `halfstep.tune` takes the model, some batches, and `loss_fn(model, batch)`, which calls the model
  and returns the loss.
- Modules, and ops in modules, can be kept in float32: give what is fragile a module of its own.
- The policy that comes of it is a file: `autocast(..., policy=Policy.load(file), module=model)`.

Run: python examples/tune/signals.py --tune my.policy
Then: python examples/tune/signals.py --policy my.policy
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import GradScaler, Policy, autocast, preset, tune

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Power(nn.Module):
    """The logarithm of the power in square millivolts: 1 V is 1e6, which float16 cannot hold."""

    def forward(self, volts: Tensor) -> Tensor:
        """Map any shape to the same."""
        millivolts = 1000 * volts
        return (millivolts * millivolts + 1).log()


class TimeOfDay(nn.Module):
    """The sine of a time in seconds since midnight: float16 knows it to 32 seconds only."""

    def forward(self, minutes: Tensor) -> Tensor:
        """Map any shape to the same."""
        seconds = 43_200 + 60 * minutes
        return torch.sin(2 * math.pi / 60 * seconds)


def make() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], object]:
    """Return the model, batches, and the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), Power(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), TimeOfDay(),
        nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 2),
    )  # fmt: skip
    return model.to(DEVICE), [signals() for _ in range(2)], loss_fn


def signals(num: int = 256) -> tuple[Tensor, Tensor]:
    """Return signals, ``[num, 32]``, and what is asked of them, ``[num, 2]``."""
    size, begin = torch.rand(2, num, 1, device=DEVICE)
    times = torch.linspace(0, 2 * math.pi, 32, device=DEVICE)
    return size * torch.sin(times + math.pi * begin), torch.cat([size, begin], dim=1)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error, in float32."""
    inputs, targets = batch
    return F.mse_loss(model(inputs).float(), targets)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tune", type=Path, help="find a policy, write it to this file, and end")
    parser.add_argument("--policy", type=Path, help="a file that --tune has written")
    arguments = parser.parse_args()
    if arguments.tune:
        tuned = tune(*make())
        print(tuned)
        tuned.policy.save(arguments.tune)
        return
    policy = Policy.load(arguments.policy) if arguments.policy else preset("standard")

    model, _, _ = make()
    optimizer, scaler, skipped = (
        torch.optim.Adam(model.parameters(), lr=1e-3),
        GradScaler(DEVICE),
        0,
    )
    for step in range(1, arguments.steps + 1):
        optimizer.zero_grad()
        with autocast(DEVICE, dtype=torch.float16, policy=policy, module=model):
            loss = loss_fn(model, signals())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        skipped += not scaler.outcome(optimizer).taken
        scaler.update()
        if step == 1 or step % max(1, arguments.steps // 5) == 0:
            print(f"step {step:4}  loss {loss.item():.5f}")
    print(f"result: {skipped} of {arguments.steps} steps were skipped with {policy}")


if __name__ == "__main__":
    main()
