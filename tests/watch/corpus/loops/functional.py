# expect: maths of log

import torch
from torch import Tensor


def functional(run: Run) -> None:
    params = dict(run.model.named_parameters())
    for x, y in run.batches:

        def loss_of(params: dict[str, Tensor], x: Tensor = x, y: Tensor = y) -> Tensor:
            return log_ratio(torch.func.functional_call(run.model, params, x), y)

        gradients, loss = torch.func.grad_and_value(loss_of)(params)
        for name, gradient in gradients.items():
            params[name].grad = gradient
        run.note(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
