"""A gradient penalty: the loss contains a gradient, which must be scaled and unscaled by hand.

Task: a critic with gradients of length 1 measures how far two clouds of points are apart (the
Wasserstein distance, with the penalty of WGAN-GP).

Rules to remember:
- Scale what goes into `torch.autograd.grad(..., create_graph=True)`, or small gradients are lost.
- Divide what comes out by the scale, outside autocast, in float32; then compute the penalty from it
  inside autocast, like any other forward pass.
- The sum of loss and penalty is scaled again for backward, as always.

Run: python examples/gradient_penalty.py
"""

import argparse

import torch
from torch import nn

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
DISTANCE = 2.0  # the second cloud is the first one moved by this


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    critic = nn.Sequential(
        nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
    ).to(device)
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    # The sum below hands the scale as it is to float16 outputs, where 65536 would be inf.
    scaler = GradScaler(device, init_scale=2.0**13)
    shift = torch.tensor([DISTANCE, 0.0], device=device)

    for step in range(1, steps + 1):
        near, far = torch.randn(2, 256, 2, device=device)
        far = far + shift
        between = torch.lerp(near, far, torch.rand(256, 1, device=device)).requires_grad_()

        optimizer.zero_grad()
        with autocast(device_type=device, dtype=torch.float16):
            estimate = critic(far).mean() - critic(near).mean()
            values = critic(between).sum()

        scaled = torch.autograd.grad(scaler.scale(values), between, create_graph=True)[0]
        gradient = scaled / scaler.get_scale()

        with autocast(device_type=device, dtype=torch.float16):
            length = gradient.norm(dim=1)
            penalty = (length - 1).square().mean()
            loss = 10 * penalty - estimate
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

        if step == 1 or step % max(1, steps // 5) == 0:
            print(
                f"step {step:4}  loss {loss.item():7.4f}  length of the gradients "
                f"{length.mean().item():.3f}  scale {scaler.get_scale():.0f}"
            )

    with torch.no_grad(), autocast(device_type=device, dtype=torch.float16):
        cloud = torch.randn(5000, 2, device=device)
        estimate = (critic(cloud + shift).float() - critic(cloud).float()).mean().item()
    estimate /= length.mean().item()  # the estimate pulls the length to a little over 1
    print(f"result: the clouds are {estimate:.3f} apart, in truth {DISTANCE:.3f}")


if __name__ == "__main__":
    main()
