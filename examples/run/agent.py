"""A script that knows PyTorch's names only and trains badly in float16: let halfstep say why.

A policy and a value head, as in reinforcement learning. The returns are large numbers, so that the
gradients of the value head are, too: they keep the scale small, and at that scale the gradients
of the rest underflow. The loss goes down all the same, and PyTorch says nothing.

    python examples/run/agent.py
    halfstep run -o runs/agent --every 20 examples/run/agent.py
    halfstep report runs/agent

Rules to remember:
- The script need not know of halfstep; autocast and GradScaler are replaced under all their names.
- The report's first sentences say what happened, where, and what helps.
- Gradients that overflow beside gradients that underflow: no scale is right for both. Bring the
  losses to one unit (here: divide the returns by ten million: --unit 1e7), or use bfloat16.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual block of a transformer without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, width]`` for the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Agent(nn.Module):
    """Says what to do and what it will bring."""

    def __init__(self, width: int = 64, num_actions: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.policy = nn.Linear(width, num_actions)
        self.value = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits ``[batch, actions]`` and values ``[batch]`` for ``[batch, 16]``."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.policy(x), self.value(x.detach()).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--unit", type=float, default=1.0, help="what the returns are divided by")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    agent = Agent().to(device)
    optimizer = torch.optim.AdamW(agent.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, growth_interval=20)
    for step in range(args.steps):
        states = torch.randn(64, 16, device=device)
        actions = states[:, :10].argmax(dim=1)
        returns = 1e7 * states.square().sum(dim=1) / args.unit
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            logits, values = agent(states)
            policy_loss = F.cross_entropy(logits, actions)
            loss = (
                policy_loss + F.mse_loss(values.float(), returns)
            ) / 65536  # a mean over so many workers
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:3d}  policy loss {policy_loss.item():.3f}")


if __name__ == "__main__":
    main()
