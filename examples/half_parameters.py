"""A model stored in bfloat16, trained with and without master weights.

Task: fit a product of two waves; three runs with the same start and the same batches.

Rules to remember:
- A bfloat16 weight has 8 binary digits: an update below 1/512 of it is lost.
- `master_weights(optimizer)` stores what rounding drops, in 2 bytes a weight.
- The optimizer steps in float32. It stays the same object, for schedulers, GradScaler, state_dict.

Run: python examples/half_parameters.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import halfstep

device = "cuda" if torch.cuda.is_available() else "cpu"


def train(steps: int, dtype: torch.dtype, has_masters: bool) -> float:
    """Train, print what became of it, and return the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 1)).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    if has_masters:
        halfstep.master_weights(optimizer)
    lost = halfstep.lost_updates(optimizer)

    for _ in range(steps):
        x = 2 * torch.rand(256, 2, device=device) - 1
        y = torch.sin(3 * x[:, :1]) * torch.cos(3 * x[:, 1:])
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.to(dtype)).float(), y)
        loss.backward()
        with lost:
            optimizer.step()

    with torch.no_grad():
        torch.manual_seed(1)
        x = 2 * torch.rand(4096, 2, device=device) - 1
        y = torch.sin(3 * x[:, :1]) * torch.cos(3 * x[:, 1:])
        error = F.mse_loss(model(x.to(dtype)).float(), y).item()
    name = f"{dtype}".removeprefix("torch.") + (" + master weights" if has_masters else "")
    print(f"{name:26} error {error:.4f}, {lost.share:.1%} of all updates lost to rounding")
    return error


def main() -> None:
    """Train three times and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args().steps
    plain = train(steps, torch.bfloat16, has_masters=False)
    masters = train(steps, torch.bfloat16, has_masters=True)
    train(steps, torch.float32, has_masters=False)
    print(f"result: master weights divide the error by {plain / masters:.1f}")


if __name__ == "__main__":
    main()
