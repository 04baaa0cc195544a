# kind: 3
# expect: growth
# says: the largest weight of LBFGS grew from \S+ to \S+ in step 1, at a learning rate of 300
# cure: strong_wolfe
# step: 1
import torch

torch.manual_seed(0)
x = torch.randn(32, 4)
y = torch.randn(32)
w = torch.nn.Parameter(torch.ones(4))
opt = torch.optim.LBFGS([w], lr=300.0, max_iter=12)


def closure():
    opt.zero_grad()
    loss = (torch.exp(x @ w) - y).square().mean()  # bad
    loss.backward()
    return loss


for _ in range(4):
    opt.step(closure)
