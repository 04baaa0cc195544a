# kind: a clamp of almost all values is no cure if what the model is given can be made small
# expect: maths exp
# cure: ^standardise \S*x\S*, as by .* reaches 4,09\d
# says: tried for .* the loss falls
# never: clamp
import torch
from torch import nn

torch.manual_seed(0)
encoder, decoder = nn.Linear(64, 16), nn.Linear(8, 64)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=2e-3)
for _ in range(3):
    x = torch.randint(0, 4096, (64, 64)).float()
    mean, log_var = encoder(x).chunk(2, 1)
    out = decoder(mean + torch.exp(0.5 * log_var) * torch.randn_like(mean))  # bad
    spread = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
    loss = nn.functional.mse_loss(out, x, reduction="sum") / len(x) + spread
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
