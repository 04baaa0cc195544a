# expect: maths of reciprocal

import torch


def bad_gradients_by_hand(run: Run) -> None:
    for x, y in run.batches:
        loss = (run.model(x) * y.gt(0).all()).square().mean()
        run.note(loss)
        run.optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        factor = 1.0 / norm  # bad
        for gradient in gradients:
            gradient.mul_(factor)
        run.optimizer.step()
