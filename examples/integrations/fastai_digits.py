"""fastai: a Learner with halfstep's callback for mixed precision.

Task: classify scikit-learn's handwritten digits. One batch is corrupt: one pixel is inf.

Rules to remember:
- `Learner(..., cbs=MixedPrecision())` instead of `.to_fp16()`. It works on a CPU as well.
- `learn.mixed_precision` has `scaler` and `outcome`. A callback that is to follow taken steps asks
  there; `after_cancel_step` comes at skipped ones.
- bfloat16 needs no scale. Bad steps are skipped all the same with a scaler that has a fixed one:
  `MixedPrecision(torch.bfloat16, scaler=GradScaler(init_scale=1.0, schedule=Static()))`.
- `learn.save` knows of no scaler: save `learn.mixed_precision.scaler.state_dict()` with it.

Run: python examples/integrations/fastai_digits.py
"""

import argparse

import torch
import torch.nn.functional as F
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from sklearn.datasets import load_digits
from torch import Tensor, nn

from halfstep.integrations.fastai import MixedPrecision

device = "cuda" if torch.cuda.is_available() else "cpu"
BROKEN = 20  # the number of the broken batch


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)


def make_batches(num: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return batches of 64 digits to learn, and 297 digits to test: pixels and classes of each."""
    torch.manual_seed(0)
    pixels, classes = map(torch.tensor, load_digits(return_X_y=True))
    x, y = (pixels / 16).float().to(device), classes.to(device)
    learned, tested = torch.randperm(len(x)).split(1500)
    chosen = learned[torch.randint(1500, (num, 64))]
    batches = [(x[each], y[each]) for each in chosen]
    for broken, _ in batches[BROKEN - 1 : BROKEN]:
        broken[0, 0] = torch.inf
    return batches, (x[tested], y[tested])


class Print(Callback):
    """Prints what became of the steps."""

    order, run_valid = MixedPrecision.order + 2, False

    def after_step(self) -> None:
        """Print a skipped step, and now and then one that was taken."""
        outcome, step = self.mixed_precision.outcome, self.train_iter + 1
        if outcome.skipped:
            print(f"step {step:4}  skipped, {outcome.reason}")
        elif step % max(1, self.n_iter // 10) == 1:
            print(f"step {step:4}  loss {self.loss.item():.6f}  norm {outcome.norm:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps

    batches, test = make_batches(steps)
    callbacks = [MixedPrecision(max_norm=0.5), Print()]
    data = DataLoaders(batches, [test])
    learn = Learner(data, make_model(), F.cross_entropy, metrics=accuracy, cbs=callbacks)
    with learn.no_logging(), learn.no_bar():
        learn.fit(1, lr=3e-3)
        _, right = learn.validate()

    taken, skipped, *_ = learn.mixed_precision.scaler.counts()
    print(f"result: {right:.1%} read, {taken} steps taken, {skipped} skipped")


if __name__ == "__main__":
    main()
