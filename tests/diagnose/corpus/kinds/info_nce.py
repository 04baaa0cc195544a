# expect: maths of log
# dtypes: none

# --- batch: x, tau
tau = 0.5

# --- bad batch
tau = 1e-4

# --- loss
z = F.normalize(model(x), dim=-1)
e = torch.exp((z @ z.t() - 1) / tau)
others = e.sum(-1) - e.diagonal()
loss = -torch.log(others).mean()  # bad
