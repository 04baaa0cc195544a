# kind: a cast overflows before a division would have made its values small
# expect: range _to_copy
# cure: ^t = time\(seconds\.unsqueeze\(1\) / 86400\)
# learns: losses[-1] < losses[0]
import torch
from torch import nn

torch.manual_seed(15)
time, head = nn.Linear(1, 16), nn.Linear(16, 1)
optimizer, losses = torch.optim.AdamW([*time.parameters(), *head.parameters()], lr=3e-2), []
for step in range(30):
    seconds = torch.randint(0, 43200 if step < 3 else 86400, (64,)).float()
    with torch.autocast("cpu", dtype=torch.float16):
        t = time(seconds.half().unsqueeze(1) / 86400)  # bad
        out = head(t.tanh()).float().squeeze(1)
    loss = nn.functional.mse_loss(out, torch.sin(seconds / 86400 * 6.2832))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
