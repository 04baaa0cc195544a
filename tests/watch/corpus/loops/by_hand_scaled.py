# expect: maths of log

import torch
import halfstep


def by_hand_scaled(run: Run) -> None:
    for x, y in run.batches:
        with halfstep.autocast(DEVICE, torch.bfloat16):
            out = run.model(x)
            ratio = torch.log(y)  # bad
            loss = (out - ratio).square().mean()
        run.take_scaled(loss)
