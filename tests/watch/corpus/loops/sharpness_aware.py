# expect: maths of reciprocal

import torch


def sharpness_aware(run: Run) -> None:
    weights = [*run.model.parameters()]
    for x, y in run.batches:

        def loss_of(x=x, y=y):
            loss = (run.model(x) * y.gt(0).all()).square().mean()
            run.optimizer.zero_grad()
            loss.backward()
            return loss

        run.note(loss_of())
        with torch.no_grad():
            norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
            scale = 0.05 / norm  # bad
            offsets = [weight.grad * scale for weight in weights]
            for weight, offset in zip(weights, offsets, strict=True):
                weight.add_(offset)
        loss_of()
        with torch.no_grad():
            for weight, offset in zip(weights, offsets, strict=True):
                weight.sub_(offset)
        run.optimizer.step()
