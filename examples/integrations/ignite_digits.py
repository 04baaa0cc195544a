"""ignite: an `Engine` with an update function that has halfstep's autocast and scaler.

Task: classify scikit-learn's handwritten digits. One batch is corrupt: one pixel is inf.

Rules to remember:
- `create_supervised_trainer(amp_mode="amp", scaler=GradScaler())` works too, on CUDA, in float16
  and without clipping: that is written into it. All else is an update function of one's own.
- What comes after a step is a handler of `ITERATION_COMPLETED`; `scaler.outcome(optimizer).taken`
  says whether there was one.
- `Checkpoint` saves a scaler as it saves a model: `{"model": model, "scaler": scaler}`.
- `TerminateOnNan` would end the training at a batch that the scaler skips: leave it out.

Run: python examples/integrations/ignite_digits.py
"""

import argparse

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from sklearn.datasets import load_digits
from torch import Tensor, nn

from halfstep import GradScaler, autocast

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps

    model = make_model()
    batches, (x_test, y_test) = make_batches(steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = GradScaler(device, module=model)

    def update(engine: Engine, batch: tuple[Tensor, Tensor]) -> float:
        x, y = batch
        optimizer.zero_grad()
        with autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=0.5)
        scaler.update()
        return loss.item()

    trainer = Engine(update)

    @trainer.on(Events.ITERATION_COMPLETED)
    def after_step() -> None:
        outcome, step = scaler.outcome(optimizer), trainer.state.iteration
        if outcome.taken:
            schedule.step()
        if outcome.skipped:
            print(f"step {step:4}  skipped, {outcome.reason}")
        elif step % max(1, steps // 10) == 1:
            print(f"step {step:4}  loss {trainer.state.output:.6f}  norm {outcome.norm:.3f}")

    trainer.run(batches)

    with torch.no_grad(), autocast(device, dtype=torch.float16):
        right = (model(x_test).argmax(1) == y_test).float().mean().item()
    taken, skipped, *_ = scaler.counts()
    print(f"result: {right:.1%} read, {taken} steps taken, {skipped} skipped")


if __name__ == "__main__":
    main()
