# kind: 3
# expect: maths log
# says: 20 steps of LBFGS
# cure: p\.clamp_min.*1 - p\)\.clamp_min
# learns: losses[-1] < 0.15
import math
import torch

torch.manual_seed(6)
beta = torch.tensor([1.5, -2.0, 0.7, 0.0, 3.0, 2.0])
lin = torch.nn.Linear(6, 1)
opt = torch.optim.LBFGS(lin.parameters(), lr=1.0, max_iter=6, history_size=5)
x = torch.randn(400, 6)
y = ((x @ beta + 0.8 * torch.randn(400)) > 0).float()
steps, bad_step, losses = 0, None, []


def closure():
    global bad_step
    opt.zero_grad()
    p = 0.5 * (1 + torch.erf(lin(x).squeeze(1) / 2**0.5))
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # bad
    loss.backward()
    if bad_step is None and not math.isfinite(loss.item()):
        bad_step = steps
    losses.append(loss.item())
    return loss


for _ in range(20):
    steps += 1
    opt.step(closure)
