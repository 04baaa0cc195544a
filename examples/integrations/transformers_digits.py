"""transformers: halfstep's scaler in a Trainer, under a policy, with a record.

Task: classify handwritten digits. One of them is corrupt: its image contains inf.

Rules to remember:
- `use_scaler(trainer.accelerator)` before `train`, with `TrainingArguments(fp16=True)`; on a CPU it
  also switches float16 on, which is silently left out there.
- `halfstep.use_policy` and `halfstep.record` go around `trainer.train()`.
- In bfloat16 there is nothing to scale: `halfstep.guard(optimizer)`, given to the Trainer in
  `optimizers=(optimizer, None)`, skips steps that are not finite.

Run: python examples/integrations/transformers_digits.py
"""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, set_seed

import halfstep
from halfstep.integrations.accelerate import use_scaler

BROKEN = 1000
"""The digit with inf."""


class Digits(nn.Module):
    """A small network, (N, 64) to (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--record", default="runs/transformers_digits")
    arguments = parser.parse_args()

    set_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    x[BROKEN, 0] = torch.inf
    data = [{"x": x[n], "labels": y[n]} for n in range(len(x))]

    model = Digits()
    trainer = Trainer(
        model,
        TrainingArguments(
            tempfile.mkdtemp(),
            fp16=True,
            use_cpu=True,
            max_steps=arguments.steps,
            per_device_train_batch_size=64,
            learning_rate=0.01,
            logging_steps=50,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=data[:1500],
    )
    scaler = use_scaler(trainer.accelerator)
    policy = halfstep.use_policy("standard; @net.2:fp32", module=model)
    with policy, halfstep.record(arguments.record):
        trainer.train()

    counts = scaler.counts()
    print(f"{counts.taken} steps taken, {counts.skipped} skipped")
    with torch.no_grad():
        accuracy = (model.net(x[1500:]).argmax(1) == y[1500:]).float().mean()
    print(f"result: {accuracy:.1%} of the digits that it has not seen are named correctly")


if __name__ == "__main__":
    main()
