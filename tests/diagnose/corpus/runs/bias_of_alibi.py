# kind: 4
# expect: range
# never: nor is it in float32
import torch
from torch import nn

torch.manual_seed(0)
emb, head = nn.Embedding(30, 16), nn.Linear(16, 30)
opt = torch.optim.Adam([*emb.parameters(), *head.parameters()], lr=1e-2)
for i in range(19):
    ids = torch.randint(0, 30, (4, 8))
    mask = torch.full((8, 8), torch.finfo(torch.float32).min).triu(0 if i == 12 else 1)
    with torch.autocast("cpu", dtype=torch.float16):
        h = emb(ids)
        scores = h @ h.transpose(1, 2) / 4
        scores = scores + mask.type_as(scores)  # bad
        out = head(scores.softmax(-1).to(h.dtype) @ h)
        loss = nn.functional.cross_entropy(out.float().flatten(0, 1), ids.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
