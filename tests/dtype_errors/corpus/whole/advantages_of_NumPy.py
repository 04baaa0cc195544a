# expect: tried, and it runs, in place of 

import numpy as np
class AC(nn.Module):
    def __init__(self):
        super().__init__()
        self.b, self.p, self.v = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)
    def forward(self, o):
        h = self.b(o).tanh()  #!
        return torch.distributions.Categorical(logits=self.p(h)), self.v(h).squeeze(-1)
ac = AC()
opt = torch.optim.Adam(ac.parameters())
rng = np.random.default_rng(0)
obs = rng.normal(size=(20, 3)); acts = rng.integers(0, 2, 20); ret = rng.normal(size=20)
for epoch in range(2):
    for idx in np.split(rng.permutation(20), 4):
        o, a, g = torch.as_tensor(obs[idx]), torch.as_tensor(acts[idx]), torch.as_tensor(ret[idx])
        dist, v = ac(o)
        adv = g - v.detach()
        pg = -(dist.log_prob(a) * adv).mean()
        vf = F.huber_loss(v, g)
        loss = pg + 0.5 * vf - 0.01 * dist.entropy().mean()
        opt.zero_grad(); loss.backward(); opt.step()
