# expect: maths of div

import torch


def weights_divided_in_place(run: Run) -> None:
    for x, y in run.batches:
        with torch.no_grad():
            run.model[0].weight.div_(y.gt(0).all())  # bad
        run.take(run.model(x).square().mean())
