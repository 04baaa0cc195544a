# kind: 3
# expect: growth
# cure: strong_wolfe
# says: call \d+ of its closure
import math

import torch

torch.manual_seed(0)
x = torch.randn(50) * 0.01
mean, var = torch.zeros((), requires_grad=True), torch.ones((), requires_grad=True)
opt = torch.optim.LBFGS([mean, var], lr=1, max_iter=10)
steps, bad_step = 0, None


def closure():
    global bad_step
    opt.zero_grad()
    loss = 0.5 * (torch.log(var) + (x - mean).square() / var).sum()  # bad
    loss.backward()
    if bad_step is None and not math.isfinite(loss.item()):
        bad_step = steps
    return loss


for _ in range(5):
    steps += 1
    opt.step(closure)
