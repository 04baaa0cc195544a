"""What GradScaler does, written out: the same runs by hand and with it, equal bit for bit.

Task: fit a product of two waves; four runs with the same start and the same batches.

Rules to remember:
- Scaling is: multiply the loss, divide the gradients, take the step only if all are finite.
- Scales are powers of two: multiplying by one changes no digit, only the exponent.
- Dynamic scaling halves the scale at each overflow and doubles it after some steps without one.

Run: python examples/by_hand.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
INTERVAL = 20  # steps without overflow until the scale doubles; 2000 in real runs


def train(steps: int, scaler: GradScaler | None, scale: float, is_dynamic: bool) -> list[Tensor]:
    """Train with the scaler, or by hand if there is none; return the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    num_good = 0

    for step in range(1, steps + 1):
        x = 2 * torch.rand(128, 2, device=device) - 1
        y = torch.sin(3 * x[:, :1]) * torch.cos(3 * x[:, 1:])
        optimizer.zero_grad()
        with autocast(device_type=device, dtype=torch.float16):
            loss = F.mse_loss(model(x), y)

        if scaler:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scale = scaler.get_scale()
        else:
            (loss * scale).backward()
            for p in model.parameters():
                p.grad.div_(scale)
            is_finite = all(p.grad.isfinite().all() for p in model.parameters())
            if is_finite:
                optimizer.step()
            num_good = num_good + 1 if is_finite else 0
            if is_dynamic and not is_finite:
                scale /= 2
            elif is_dynamic and num_good == INTERVAL:
                scale, num_good = 2 * scale, 0

        if step == 1 or step % max(1, steps // 4) == 0:
            print(f"  step {step:4}  loss {loss.item():.6f}  scale {scale:.0f}")
    return [p.detach() for p in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    static = GradScaler(device, init_scale=1024.0, growth_factor=1.0, backoff_factor=1.0)
    dynamic = GradScaler(device, init_scale=2.0**20, growth_interval=INTERVAL)
    for name, scaler in {"static": static, "dynamic": dynamic}.items():
        print(f"{name} scale, by hand and with GradScaler")
        start, is_dynamic = scaler.get_scale(), scaler is dynamic
        by_hand = train(steps, None, start, is_dynamic)
        pairs = zip(by_hand, train(steps, scaler, start, is_dynamic), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), f"{name}: the runs differ"
        print(f"result: {name}: all parameters are equal bit for bit after {steps} steps")


if __name__ == "__main__":
    main()
