# kind: 2
# expect: range linear|_to_copy
# cure: ^standardise \S*x\S*, as by .* reaches 2\d\d,\d\d\d in column 3 of 4 \(from 0\)
# cure: \nor halfstep\.autocast\(.*linear@0:fp32
# says: the loss falls
# never: not tried: standardise
import torch
from torch import nn

torch.manual_seed(0)
features = torch.cat([torch.randn(256, 3), torch.rand(256, 1) * 2e5 + 3e4], 1)
price = 2 * features[:, 0] + features[:, 3] / 1e5
model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for first in range(0, 256, 64):
    x, y = features[first : first + 64], price[first : first + 64]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x).squeeze(1).float() - y).square().mean()  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
