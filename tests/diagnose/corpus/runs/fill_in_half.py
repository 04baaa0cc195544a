# kind: 4
# expect: range
# never: nor is it in float32
# learns: loss < 1.2
import torch
from torch import nn

torch.manual_seed(0)
emb, head = nn.Embedding(20, 16), nn.Linear(16, 4)
opt = torch.optim.Adam([*emb.parameters(), *head.parameters()], lr=1e-2)
for i in range(30):
    ids = torch.randint(1, 20, (8, 6))
    bias = torch.where(ids > 17, -1e9, 0.0)
    if i == 3:
        bias[2] = -1e9
    with torch.autocast("cpu", dtype=torch.float16):
        h = emb(ids)
        scores = (h @ h.transpose(1, 2)).mean(1)
        weights = (scores + bias.half()).softmax(-1)  # bad
        out = head((weights.unsqueeze(-1) * h).sum(1) + 3 * h[:, 0])
        loss = nn.functional.cross_entropy(out.float(), ids[:, 0] % 4)
    opt.zero_grad()
    loss.backward()
    opt.step()
