# kind: 2, one row overflows a cast, after sums of energies have fallen in a sampler's gradients
# expect: range linear
# step: 8
# cure: linear@0:fp32
# never: the loss (fell|grew) from
# never: it fell to
import torch
from torch import nn

torch.manual_seed(0)
energy = nn.Sequential(
    *(nn.Linear(8, 128), nn.LayerNorm(128), nn.SiLU()),
    *(nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1)),
)
optimizer = torch.optim.Adam(energy.parameters(), lr=1e-2)


def sample(num: int) -> torch.Tensor:
    x = torch.randn(num, 8).requires_grad_()
    for _ in range(5):
        (gradient,) = torch.autograd.grad(energy(x).sum(), x)
        x = (x - 0.1 * gradient + 0.05 * torch.randn_like(x)).detach().requires_grad_()
    return x.detach()


for step in range(1, 9):
    real = torch.randn(64, 8) * 0.5 + 1
    fake = sample(64)
    if step == 8:
        real[0] *= 3e5
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        of_real = energy(real).mean()  # bad
        loss = of_real - energy(fake).mean()
    loss.backward()
    optimizer.step()
