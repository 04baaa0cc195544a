# kind: 3
# expect: maths log
# says: call \d+ of its closure
# never: the loss of step
import math
import torch

torch.manual_seed(0)
w = torch.nn.Parameter(torch.tensor([3.0, 2.0, 5.0]))
opt = torch.optim.LBFGS([w], lr=1.0, max_iter=8)
steps, bad_step = 0, None


def closure():
    global bad_step
    opt.zero_grad()
    loss = (w * torch.tensor([1.0, 4.0, 0.1])).sum() - torch.log(w).sum()  # bad
    loss.backward()
    if bad_step is None and not math.isfinite(loss.item()):
        bad_step = steps
    return loss


for _ in range(10):
    steps += 1
    opt.step(closure)
