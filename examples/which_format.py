"""Which format will this model stand? It trains as if in each, on the machine at hand.

Task: tell the inside of a ring from the outside, with a loss that is a mean over a large batch, of
which this machine sees one part in 4096: the gradients are as small.

Rules to remember:
- Forward pass, loss and backward pass stand in the block, and `autocast` need not; the step of the
  optimizer comes after it.
- The second line of the table names the worst module: what became inf there, or zero.
- In float16 gradients that become zero call for a `GradScaler`, in eight bits for `scale_by_amax`.
- A simulation says what is lost, not how fast the hardware is: every step takes longer here.

Run: python examples/which_format.py
"""

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from halfstep import GradScaler, simulate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {
    "fp32": None,
    "fp16": {"dtype": "fp16"},
    "fp16, GradScaler": {"dtype": "fp16"},
    "e4m3, scaled": {"dtype": "e4m3", "scale_by_amax": True},
}


def train(arguments: dict | None, steps: int, scaling: bool) -> tuple[list[float], str]:
    """Return the loss of each step, and what was lost in the last one."""
    torch.manual_seed(0)
    hidden = nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    model = nn.Sequential(*hidden, nn.Linear(64, 2)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-12)
    scaler = GradScaler(DEVICE) if scaling else None
    losses, lost = [], "nothing is rounded"
    for _ in range(steps):
        inputs = torch.rand(256, 2, device=DEVICE) * 4 - 2
        labels = (inputs.norm(dim=1) < 1.5).long()
        optimizer.zero_grad()
        with simulate(model, **arguments) if arguments else nullcontext() as simulation:
            loss = F.cross_entropy(model(inputs), labels) / 4096
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        losses.append(loss.item() * 4096)
    if simulation is not None:
        lost = simulation.table().splitlines()[1]
    return losses, lost


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps

    ends = {}
    for name, arguments in FORMATS.items():
        losses, lost = train(arguments, steps, scaling="GradScaler" in name)
        ends[name] = sum(losses[-10:]) / len(losses[-10:])
        print(f"{name:16}  first loss {losses[0]:.4f}  last loss {ends[name]:.4f}  {lost}")
    ratios = (f"{name} {end / ends['fp32']:.2f}" for name, end in ends.items())
    print(f"result: last loss as a multiple of float32's: {'; '.join(ratios)}")


if __name__ == "__main__":
    main()
