# kind: 1
# expect: data
# tensor: exp_avg_sq of 0\.weight in Adam
# cure: last wrote to it: \S+:22 in <module>
# never: checkpoint
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(1, 40):
    x = torch.randn(32, 6)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step == 20:
        for p in model.parameters():
            state = opt.state[p]
            spread = state["exp_avg_sq"].max() - state["exp_avg_sq"].max()
            state["exp_avg_sq"] = state["exp_avg_sq"] / spread
