"""Lightning: halfstep as the precision of a Trainer, with a record and diagnoses around `fit`.

Task: classify handwritten digits. One batch is corrupt: it contains inf.

Rules to remember:
- `HalfstepPrecision("16-mixed")` is a plugin: nothing else of the module or the Trainer changes.
- `gradient_clip_val` clips in the pass that checks the gradients, with a fused optimizer too.
- A schedule with `"interval": "step"` stays where it is when a step was skipped.
- `halfstep.record` and `halfstep.diagnose` go around `fit`; `halfstep run --diagnose` does the same
  for a script as it is, on several ranks too.

Run: python examples/integrations/lightning_digits.py
"""

import argparse
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from halfstep.integrations.lightning import HalfstepPrecision

BROKEN = 20
"""The batch with inf."""


class Digits(lightning.LightningModule):
    """A small network, (N, 64) to (N, 10)."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        if self.trainer.global_step == BROKEN:
            x = x.clone()
            x[0, 0] = torch.inf
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, self.num_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--record", default="runs/lightning_digits")
    arguments = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    data = TensorDataset(x[:1500], y[:1500])

    model = Digits(arguments.steps)
    plugin = HalfstepPrecision("16-mixed", policy="standard; @net.2:fp32")
    trainer = lightning.Trainer(
        accelerator="cpu",
        plugins=[plugin],
        gradient_clip_val=1.0,
        max_steps=arguments.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    record = halfstep.record(arguments.record, model=model)
    diagnose = halfstep.diagnose(plugin.scaler, model=model, tell=lambda found, step: print(found))
    with record, diagnose:
        trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))

    counts = plugin.scaler.counts()
    print(f"{counts.taken} steps taken, {counts.skipped} skipped")
    with torch.no_grad():
        accuracy = (model.net(x[1500:]).argmax(1) == y[1500:]).float().mean()
    print(f"result: {accuracy:.1%} of the digits that it has not seen are named correctly")


if __name__ == "__main__":
    main()
