"""accelerate: halfstep's scaler in an Accelerator, under a policy, with a record.

Task: classify handwritten digits. One batch is corrupt: it contains inf.

Rules to remember:
- `use_scaler(accelerator)` before `prepare`; on a CPU it also switches float16 on, which accelerate
  silently leaves out there.
- The policy is that of `halfstep.use_policy` around the training, as accelerate enters autocast.
- accelerate's own `optimizer_step_was_skipped` and schedules know of skipped steps, but not with a
  fused optimizer, which skips on the device: ask `scaler.outcome(optimizer)` there.

Run: python examples/integrations/accelerate_digits.py
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from halfstep.integrations.accelerate import use_scaler

BROKEN = 20
"""The batch with inf."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--record", default="runs/accelerate_digits")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=64, shuffle=True)

    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    scaler = use_scaler(accelerator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    record = halfstep.record(arguments.record)
    with halfstep.use_policy("standard; @2:fp32", module=model), record as run:
        while run.num_steps < arguments.steps:
            for batch, target in loader:
                if run.num_steps == BROKEN:
                    batch[0, 0] = torch.inf
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch), target)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.optimizer_step_was_skipped:
                    print(f"step {run.num_steps} was skipped")
                if run.num_steps == arguments.steps:
                    break

    counts = scaler.counts()
    print(f"{counts.taken} steps taken, {counts.skipped} skipped")
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    print(f"result: {accuracy:.1%} of the digits that it has not seen are named correctly")


if __name__ == "__main__":
    main()
