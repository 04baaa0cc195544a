# expect: maths of div

import torch


def weights_normalized(run: Run) -> None:
    layer = run.model[0]
    for x, y in run.batches:
        with torch.no_grad():
            rows = layer.weight * y.gt(0).all()
            layer.weight.copy_(rows / rows.norm(dim=1, keepdim=True))  # bad
        run.take(run.model(x).square().mean())
