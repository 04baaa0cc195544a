"""Why is the loss NaN? The watch names the op and the line, and the policy that cures it is used.

Task: predict what two sensors do together. From step 51 on they measure in millivolts, which nobody
has told the model: squared, the readings leave the range of float16.

Rules to remember:
- `with halfstep.diagnose(scaler):` costs next to nothing until a step goes bad; then the step is
  replayed, and nothing of the training changes.
- `found.cure` was replayed too: `found.cure.policy` is text to paste. Here the loop takes it over.
- `halfstep run --diagnose train.py` does the same for a script without an edit.

Run: python examples/why_nan.py
"""

import argparse

import torch
from torch import Tensor, nn

from halfstep import Diagnosis, GradScaler, autocast, diagnose

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
    """Train, and take over the cure of the first step that goes bad."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    model = Energy(64).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler(DEVICE)
    volts = torch.randn(256, 16, device=DEVICE)
    target = torch.tanh(volts[:, :1] * volts[:, 1:2])
    policy = "standard"

    def cure(found: Diagnosis, step: int) -> None:
        nonlocal policy
        print(f"step {step} went bad\n{found}")
        policy = found.cure.policy

    with diagnose(scaler, model=model, tell=cure):
        for step in range(1, arguments.steps + 1):
            readings = volts if step <= 50 else volts * 1000
            optimizer.zero_grad()
            with autocast(DEVICE, torch.float16, policy=policy, module=model):
                loss = nn.functional.mse_loss(model(readings).float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 1 or step % 50 == 0:
                print(f"step {step:4}  loss {loss.item():.4f}")
    baseline = f"predicting 0: {target.var():.4f}"
    print(f"result: squared error {loss.item():.4f} ({baseline}) under the policy {policy}")


if __name__ == "__main__":
    main()
