# kind: 4
# expect: range
# never: not finite in float32 either
# learns: loss < 1.25
import torch
from torch import nn

torch.manual_seed(0)
emb, qkv, head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 4)
params = [*emb.parameters(), *qkv.parameters(), *head.parameters()]
opt = torch.optim.Adam(params, lr=1e-2)
for i in range(150):
    ids = torch.randint(1, 20, (8, 6))
    mask = torch.zeros(8, 1, 6)
    mask[:, :, 4:] = torch.finfo(torch.float32).min
    if i == 3:
        mask[2] = torch.finfo(torch.float32).min  # a row of padding alone
    with torch.autocast("cpu", dtype=torch.float16):
        q, k, v = qkv(emb(ids)).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        scores = scores + mask.to(scores.dtype)  # bad
        out = head((scores.softmax(-1) @ v).mean(1))
        loss = nn.functional.cross_entropy(out.float(), ids[:, 0] % 4)
    opt.zero_grad()
    loss.backward()
    opt.step()
