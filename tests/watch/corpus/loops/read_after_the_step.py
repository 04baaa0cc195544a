# expect: maths of log

import torch


def read_after_the_step(run: Run) -> None:
    for x, y in run.batches:
        out = run.model(x)
        other = (out.detach() - torch.log(y)).square().mean() + 0 * out.mean()  # bad
        run.take_scaled(out.square().mean())
        other.item()
