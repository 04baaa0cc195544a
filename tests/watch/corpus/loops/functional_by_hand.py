# expect: maths of log

import torch
from torch import Tensor


def functional_by_hand(run: Run) -> None:
    params = {name: param.detach() for name, param in run.model.named_parameters()}
    for x, y in run.batches:

        def loss_of(params: dict[str, Tensor], x: Tensor = x, y: Tensor = y) -> Tensor:
            return log_ratio(torch.func.functional_call(run.model, params, x), y)

        gradients = torch.func.grad(loss_of)(params)
        params = {name: params[name] - 0.01 * gradients[name] for name in params}
        run.note(params["0.bias"])
