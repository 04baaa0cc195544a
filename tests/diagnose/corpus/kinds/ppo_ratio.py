# expect: maths of exp
# $clip: 0.1
# $clip: 0.2

# --- batch: x, old, advantage
old = torch.randn(x.shape[0])
advantage = torch.randn(x.shape[0])

# --- bad batch
old = old - 200

# --- loss
logp = model(x).float().log_softmax(-1)[:, 0]
ratio = torch.exp(logp - old)  # bad
clipped = ratio.clamp(1 - $clip, 1 + $clip)
loss = -torch.min(ratio * advantage, clipped * advantage).mean()
