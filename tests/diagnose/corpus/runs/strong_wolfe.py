# kind: 3
# expect: none
import torch

torch.manual_seed(0)
w = torch.nn.Parameter(torch.tensor([3.0, 2.0]))
opt = torch.optim.LBFGS([w], lr=1.0, max_iter=8, line_search_fn="strong_wolfe")


def closure():
    opt.zero_grad()
    loss = torch.exp(torch.exp(w)).sum() + torch.exp(torch.exp(-w)).sum()
    loss.backward()
    return loss


for _ in range(4):
    opt.step(closure)
