# kind: 1
# expect: none
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
scaler = torch.amp.GradScaler("cpu", enabled=False)
for i in range(60):
    x = torch.randn(32, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (model(x).squeeze(1).float() - x.sum(1)).square().mean() * (1 + i)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
