# kind: 1
# expect: data
# tensor: bias
# says: first check weights\['weight'\] in <module>: it was inf or NaN when this line wrote it: .*:26 in
# says: it has 5 inf in float16, which ends at 65,504: save it in float32
# says: :21: torch.save\(average, file\)
# never: load a checkpoint|load an earlier
# step: 5
import io

import torch
from torch import nn

torch.manual_seed(0)
model, file = nn.Linear(5, 1), io.BytesIO()
opt = torch.optim.SGD(model.parameters(), 0.01)
for step in range(1, 9):
    if step == 5:
        average = {name: p.detach().abs() + 1e5 for name, p in model.named_parameters()}
        average = {name: value.half() for name, value in average.items()}
        torch.save(average, file)
        file.seek(0)
        weights = torch.load(file)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])
    x = torch.randn(8, 5)
    loss = (model(x) - x[:, :1]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
