# expect: data of mul

import math


def bad_gradients_by_a_number(run: Run) -> None:
    for x, y in run.batches:
        loss = (run.model(x) * y.gt(0).all()).square().mean()
        run.note(loss)
        run.optimizer.zero_grad()
        loss.backward()
        norm = sum(p.grad.norm().item() for p in run.model.parameters() if p.grad is not None)
        for p in run.model.parameters():
            assert p.grad is not None
            p.grad.mul_(1.0 / norm if norm else math.nan)  # bad
        run.optimizer.step()
