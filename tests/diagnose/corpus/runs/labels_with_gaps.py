# kind: 6
# expect: data mse_loss
# tensor: \byb\b
# cure: last wrote to it: \S+:16 in <module>: y\[::31, 1\] = float\("nan"\)
# cure: tensors\[1\] of TensorDataset is not finite in 9 of 256 rows, column 1 of 2 \(from 0\)
# cure: keep = \S*yb\S*\.isfinite\(\).*, then inputs\[keep\] and targets\[keep\]
# never: leave this batch out
# step: 1
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(16)
x = torch.randn(256, 12)
y = torch.stack([x[:, 0] * 2 - x[:, 1], x[:, 2]], 1)
y[::31, 1] = float("nan")
model = nn.Linear(12, 2)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(3):
    for xb, yb in DataLoader(TensorDataset(x, y), batch_size=16):
        loss = nn.functional.mse_loss(model(xb), yb)  # bad
        if torch.isnan(loss):
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
