# expect: maths of sqrt

import torch


def stepped_by_hand_before_an_optimizer(run: Run) -> None:
    for x, y in run.batches:
        backward_of_roots(run, x, y)
        with torch.no_grad():
            for p in run.model.parameters():
                p.add_(0.001)  # as noise is
        run.optimizer.step()
