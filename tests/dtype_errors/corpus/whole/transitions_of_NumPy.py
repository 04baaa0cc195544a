# expect: tried, and it runs, in place of 

import numpy as np
q, target = nn.Linear(4, 2), nn.Linear(4, 2)
opt = torch.optim.Adam(q.parameters())
rng = np.random.default_rng(0)
buffer = [(rng.normal(size=4), int(rng.integers(2)), float(rng.normal()), rng.normal(size=4), bool(rng.random() < .1)) for _ in range(64)]
def sample(n):
    idx = rng.integers(0, len(buffer), n)
    s, a, r, s2, d = zip(*(buffer[i] for i in idx))
    return (torch.from_numpy(np.stack(s)), torch.tensor(a), torch.from_numpy(np.array(r)),
            torch.from_numpy(np.stack(s2)), torch.tensor(d))
for step in range(5):
    s, a, r, s2, d = sample(16)
    qa = q(s).gather(1, a[:, None]).squeeze(1)  #!
    with torch.no_grad():
        nxt = target(s2).max(1).values
        y = r + 0.99 * nxt * (~d)
    loss = F.smooth_l1_loss(qa, y)
    opt.zero_grad(); loss.backward(); opt.step()
