"""bfloat16 on the CPU: autocast alone, no scaler.

Task: tell English text (Python's help pages) from Python source by the bytes of a short piece.

Rules to remember:
- bfloat16 has the range of float32: gradients do not underflow, so no GradScaler.
- It has 8 bits of precision: weights, gradients and optimizer state stay in float32; only what
  the ops take and return is bfloat16.
- Leave autocast before you call backward, and call `.float()` on outputs that go to numpy.

Run: python examples/cpu_bf16.py
"""

import argparse
import inspect
import random
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import autocast


def pieces(text: str) -> Tensor:
    """Return how often each byte is in each piece of 64 bytes, (pieces, 128)."""
    data = torch.tensor(list(text.encode("ascii", "ignore")))
    whole = data[: len(data) // 64 * 64].reshape(-1, 64)
    return torch.zeros(len(whole), 128).scatter_add(1, whole, torch.ones(whole.shape))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    english = pieces(" ".join("\n".join(topics.values()).split()))
    python = pieces(" ".join("".join(map(inspect.getsource, (argparse, inspect, random))).split()))
    size = min(len(english), len(python))
    inputs = torch.cat([english[:size], python[:size]])
    labels = torch.cat([torch.zeros(size), torch.ones(size)]).long()
    order = torch.randperm(2 * size)
    train, held_out = order[:-1000], order[-1000:]

    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(1, steps + 1):
        batch = train[torch.randint(len(train), (128,))]
        optimizer.zero_grad()
        with autocast(device_type="cpu", dtype=torch.bfloat16):
            logits = model(inputs[batch])
            loss = F.cross_entropy(logits, labels[batch])
        loss.backward()
        optimizer.step()
        if step == 1 or step % max(1, steps // 5) == 0:
            print(f"step {step:4}  loss {loss.item():.4f}")

    weight = model[0].weight
    print(f"outputs {logits.dtype}, loss {loss.dtype}")
    print(f"weights {weight.dtype}, gradients {weight.grad.dtype}")
    with torch.no_grad(), autocast(device_type="cpu", dtype=torch.bfloat16):
        is_right = model(inputs[held_out]).argmax(dim=1) == labels[held_out]
    print(f"result: {is_right.float().mean().item():.1%} of 1000 held-out pieces told right")


if __name__ == "__main__":
    main()
