# kind: 1
# expect: growth mse_loss
# cure: lower weight_decay
# never: discount|clamp\(
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 64))
opt = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=120.0)
for i in range(68):
    x = torch.randn(128, 6)
    loss = nn.functional.mse_loss(model(x), x.repeat(1, 11)[:, :64])  # bad
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
