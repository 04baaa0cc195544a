"""Epochs over a DataLoader, evaluation under autocast, checkpoints that resume exactly.

Task: predict the next byte of English text (Python's own help pages) from the 8 before it.

Rules to remember:
- Evaluation runs under autocast too, with `torch.no_grad()`; it needs no scaler.
- The scaler has state, as the optimizer has: save and load `scaler.state_dict()` with the others.
- Save between iterations, after `scaler.update()`.

Run: python examples/epochs_dataloader.py --checkpoint /tmp/bytes.pt --epochs 2
and again with --epochs 4: it goes on after epoch 2, as if it had never stopped.
"""

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="per epoch")
    parser.add_argument("--checkpoint", type=Path, help="written after each epoch, read at start")
    options = parser.parse_args()

    torch.manual_seed(0)
    text = "\n".join(topics.values()).encode("ascii", "ignore")
    windows = torch.tensor(list(text)).unfold(0, 9, 1)
    held_out, rest = windows[-2000:].to(device), windows[:-2000]
    train = rest[torch.randperm(len(rest))[: options.steps * 256]]

    model = nn.Sequential(
        nn.Embedding(128, 16), nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
    scaler = GradScaler(device, growth_interval=150)  # the default, 2000, suits longer runs

    first_epoch = 1
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    if options.checkpoint and options.checkpoint.exists():
        state = torch.load(options.checkpoint, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first_epoch = state["epoch"] + 1
        if first_epoch > options.epochs:
            raise SystemExit(f"{options.checkpoint} has {first_epoch - 1} epochs already")

    for epoch in range(first_epoch, options.epochs + 1):
        order = torch.Generator().manual_seed(epoch)  # the same order also after a resume
        for (batch,) in DataLoader(TensorDataset(train), 256, shuffle=True, generator=order):
            batch = batch.to(device)
            optimizer.zero_grad()
            with autocast(device_type=device, dtype=torch.float16):
                loss = F.cross_entropy(model(batch[:, :8]), batch[:, 8])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        with torch.no_grad(), autocast(device_type=device, dtype=torch.float16):
            loss = F.cross_entropy(model(held_out[:, :8]), held_out[:, 8]).item()
        print(f"epoch {epoch}  held-out loss {loss:.4f}  scale {scaler.get_scale():.0f}")
        if options.checkpoint:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state | {"epoch": epoch}, options.checkpoint)

    print(f"result: {loss / math.log(2):.2f} bits per byte on held-out text, 7 before training")


if __name__ == "__main__":
    main()
