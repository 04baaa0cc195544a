"""timm: a training loop like that of its train.py, with halfstep's scaler.

Task: classify scikit-learn's handwritten digits. One batch is corrupt: one pixel is inf.

Rules to remember:
- One line is added: timm's `NativeScaler` holds a scaler, in `_scaler`.
- timm's schedules take the number of updates: count those that were taken.
- An average of the weights waits for a step that was taken: `scaler.outcome(optimizer)`.
- train.py averages the losses: a NaN of a batch that is skipped stays in what it prints.

Run: python examples/integrations/timm_digits.py
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.models import MlpMixer
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, NativeScaler
from torch import Tensor, nn

from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
BROKEN = 20  # the number of the broken batch


def make_model() -> nn.Module:
    torch.manual_seed(0)
    shape = {"img_size": 8, "patch_size": 2, "embed_dim": 64, "num_blocks": 1}
    return MlpMixer(in_chans=1, num_classes=10, **shape).to(device)


def make_batches(num: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return batches of 64 digits to learn, and 297 digits to test: pixels and classes of each."""
    torch.manual_seed(0)
    pixels, classes = map(torch.tensor, load_digits(return_X_y=True))
    x, y = (pixels / 16).float().view(-1, 1, 8, 8).to(device), classes.to(device)
    learned, tested = torch.randperm(len(x)).split(1500)
    chosen = learned[torch.randint(1500, (num, 64))]
    batches = [(x[each], y[each]) for each in chosen]
    for broken, _ in batches[BROKEN - 1 : BROKEN]:
        broken[0, 0, 0, 0] = torch.inf
    return batches, (x[tested], y[tested])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    steps = parser.parse_args().steps

    model = make_model()
    batches, (x_test, y_test) = make_batches(steps)
    average = ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-2)
    schedule = CosineLRScheduler(optimizer, steps, t_in_epochs=False)
    loss_scaler = NativeScaler(device)
    scaler = loss_scaler._scaler = GradScaler(device, module=model)

    num_updates = 0
    for step, (x, y) in enumerate(batches, 1):
        optimizer.zero_grad()
        with autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        outcome = scaler.outcome(optimizer)
        num_updates += outcome.taken
        schedule.step_update(num_updates)

        if outcome.taken:
            average.update(model)
        if outcome.skipped:
            print(f"step {step:4}  skipped, {outcome.reason}")
        elif step % max(1, steps // 10) == 1:
            print(f"step {step:4}  loss {loss.item():.6f}  norm {outcome.norm:.3f}")

    with torch.no_grad(), autocast(device, dtype=torch.float16):
        right = (average(x_test).argmax(1) == y_test).float().mean().item()
    taken, skipped, *_ = scaler.counts()
    print(f"result: {right:.1%} read, {taken} steps taken, {skipped} skipped")


if __name__ == "__main__":
    main()
