# kind: what a module is given besides a batch, a state for each layer, is bad
# expect: data
# tensor: \bstate\b
# cure: \nlook where state
# never: keep =|this batch
# step: 1
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
state = torch.from_numpy(np.zeros((2, 12, 8), dtype="float32"))
state[1] = float("nan")
rnn, head = nn.GRU(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 1)
optimizer = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=1e-2)
for _ in range(3):
    x = torch.randn(12, 5, 6)
    loss = head(rnn(x, state)[0][:, -1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
