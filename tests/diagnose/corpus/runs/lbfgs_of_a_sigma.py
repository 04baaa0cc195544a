# kind: 3
# says: line_search_fn="strong_wolfe"
# expect: maths log
# cure: log_sigma.exp\(\)
# never: clamp_min
import torch

torch.manual_seed(12)
x = torch.linspace(-2, 2, 200)
y = 2 * x + 1 + 0.1 * torch.randn(200)
slope, sigma = torch.zeros((), requires_grad=True), torch.tensor(5.0, requires_grad=True)
opt = torch.optim.LBFGS([slope, sigma], lr=1.0, max_iter=3, history_size=6)


def closure():
    opt.zero_grad()
    loss = (0.5 * ((y - slope * x - 1) / sigma) ** 2 + torch.log(sigma)).mean()  # bad
    loss.backward()
    return loss


for _ in range(40):
    opt.step(closure)
