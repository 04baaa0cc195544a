# expect: maths of log

import torch
import halfstep


def left_out_before_autocast(run: Run) -> None:
    for x, y in run.batches:
        with halfstep.autocast(DEVICE, torch.float16):
            out = run.model(x)
        large = (out.float() * 1e4) @ torch.full((3, 3), 1e4)
        loss = (large * 1e-8 - torch.log(y)).square().mean()  # bad
        if loss.isinf():
            continue
        run.take(loss)
