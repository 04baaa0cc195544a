# expect: tried, and it runs, in place of 

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh()).bfloat16()
        self.pi, self.v = nn.Linear(16, 2), nn.Linear(16, 1)

    def act(self, obs):
        h = self.body(obs)  #!
        dist = torch.distributions.Categorical(logits=self.pi(h))
        return dist, self.v(h).squeeze(-1)

model = Agent()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

def rollout(n):
    obs = torch.randn(n, 4)
    dist, value = model.act(obs)
    action = dist.sample()
    reward = (action == 0).float()
    return dist.log_prob(action), value, reward

for step in range(4):
    logp, value, reward = rollout(16)
    adv = (reward - value).detach()
    loss = -(logp * adv).mean() + F.mse_loss(value, reward)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
