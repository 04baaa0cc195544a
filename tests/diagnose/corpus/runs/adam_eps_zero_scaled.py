# kind: 1
# expect: optimizer
# says: AdamW.* of emb\.weight NaN.*gradients were finite
# says: eps is 0
# cure: group\["eps"\] = 1e-08$
# step: 1
import torch
from torch import nn

import halfstep

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(40, 8), nn.Linear(8, 4)

    def forward(self, ids):
        return self.head(self.emb(ids).mean(1))


model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=0, foreach=True)
scaler = halfstep.GradScaler("cpu", init_scale=64.0)
for i in range(7):
    ids = torch.randint(0, 20 if i < 10 else 40, (16, 5))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(ids), ids[:, 0] % 4)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)  # bad
    scaler.update()
