"""A script that knows PyTorch's names only and whose loss becomes NaN: let halfstep say why.

Task: predict what two sensors do together. From step 51 on they measure in millivolts, which nobody
has told the model: squared, the readings leave the range of float16, and no step is taken any more.

    python examples/run/why_nan.py
    halfstep run --diagnose examples/run/why_nan.py
    halfstep report

Rules to remember:
- `--diagnose` costs next to nothing until a step goes bad; then the step is replayed, and nothing
  of the training changes.
- The cure was replayed too: it is a command to paste, and a policy to put into the script.
"""

import argparse

import torch
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Energy(nn.Module):
    """Squares what a layer makes of the readings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, 16]`` to ``[batch, 1]``."""
        hidden = self.first(x)
        return self.head(self.norm(hidden * hidden))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = Energy(64).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(DEVICE)
    volts = torch.randn(256, 16, device=DEVICE)
    target = torch.tanh(volts[:, :1] * volts[:, 1:2])
    for step in range(1, arguments.steps + 1):
        readings = volts if step <= 50 else volts * 1000
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = nn.functional.mse_loss(model(readings).float(), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 1 or step % 50 == 0:
            print(f"step {step:4}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
