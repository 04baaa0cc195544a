# kind: a parameter that a step took below 0 is trained as a logarithm
# expect: maths log
# cure: train the logarithm of noise, a parameter
import torch

torch.manual_seed(0)
x = torch.randn(40)
y = 2 * x + 0.05 * torch.randn(40)
slope, noise = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.tensor(0.5))
opt = torch.optim.SGD([slope, noise], lr=0.2)
for _ in range(60):
    loss = ((y - slope * x) ** 2).mean() / (2 * noise**2 + 0.1) + torch.log(noise / 0.02)  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
