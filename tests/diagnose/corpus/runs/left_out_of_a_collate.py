# kind: 6
# expect: data
# tensor: b\['x'\]
# step: 5
# says: first check collate \(\S+:17\), which loads it, and what that reads
# says: b\['x'\] in .* is not finite in rows 10 and 11 of 20 \(from 0\), column 2 of 6 \(from 0\)
# says: the script left this batch out
# never: leave this batch out
import torch
from torch import nn

torch.manual_seed(0)
data = [(torch.rand(6), torch.rand(())) for _ in range(200)]
data[90][0][2] = data[91][0][2] = float("inf")


def collate(items):
    xs, ys = zip(*items, strict=True)
    return {"x": torch.stack(xs), "y": torch.stack(ys)}


net = nn.Linear(6, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for b in torch.utils.data.DataLoader(data, batch_size=20, collate_fn=collate):
    loss = (net(b["x"]).squeeze(1) - b["y"]).square().mean()
    if not loss.isfinite():
        continue
    opt.zero_grad()
    loss.backward()
    opt.step()
