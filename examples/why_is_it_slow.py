"""Why is mixed precision slow here? A trace of one step shows its casts.

Task: learn what an attention layer with other weights does.

Rules to remember:
- Trace a step or two, not the run: a trace makes every op slower, and changes no result.
- The table shows that q, k and v each cast the same float32 output of gelu. A rule that lowers gelu
  makes that one cast; it also rounds its results, so check the loss before you keep it.

Run: python examples/why_is_it_slow.py
"""

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import autocast, trace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    """One head. Its input is float32 and no rule is about gelu: q, k and v each lower the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        x = F.gelu(x)
        weights = F.softmax(self.q(x) @ self.k(x).transpose(-1, -2), dim=-1)
        return self.out(weights @ self.v(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    model, teacher = Attention(64).to(DEVICE), Attention(64).to(DEVICE)
    inputs = torch.randn(64, 32, 64, device=DEVICE)
    with torch.no_grad(), autocast(DEVICE, dtype=torch.bfloat16):
        targets = teacher(inputs).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    policy, traces = "standard", []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        with trace(model) if step <= 2 else nullcontext() as t:
            with autocast(DEVICE, dtype=torch.bfloat16, policy=policy, module=model):
                loss = F.mse_loss(model(inputs), targets)
            loss.backward()
        optimizer.step()
        if t is not None:
            traces.append(t)
        if step == 1:
            print(t.table())
            policy = "standard; gelu:lower"
            print(f"\nfrom here on: {policy}")
        if step == 1 or step % max(1, steps // 5) == 0:
            print(f"step {step:4}  loss {loss.item():.5f}")

    moved = [sum(row.cast_bytes for row in t.ops) for t in traces]
    print(f"result: casts move {moved[0]:,} bytes in step 1 and {moved[-1]:,} with {policy!r}")


if __name__ == "__main__":
    main()
