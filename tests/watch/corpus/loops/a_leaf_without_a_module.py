# expect: maths of sqrt

import torch


def a_leaf_without_a_module(run: Run) -> None:
    leaf = torch.ones(3, requires_grad=True)
    run.optimizer = torch.optim.SGD([leaf], lr=1e-2)
    for _, y in run.batches:
        run.take(torch.sqrt(leaf * y).mean())  # bad
    run.losses += [leaf.detach()]
