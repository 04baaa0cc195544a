# expect: maths of sqrt

import torch


def stepped_by_hand_without_data(run: Run) -> None:
    for x, y in run.batches:
        backward_of_roots(run, x, y)
        with torch.no_grad():
            for p in run.model.parameters():
                p -= 0.01 * p.grad
