# expect: maths of _softmax
# $softmax: scores.softmax(-1)
# $softmax: torch.softmax(scores, dim=-1)
# $softmax: F.softmax(scores, -1)
# inputs: 6

# --- setup
model = nn.Linear(6, 6)

# --- batch: x, padding
x = torch.randn(2, 5, 6)
padding = torch.zeros(2, 5, dtype=torch.bool)

# --- bad batch
padding[0] = True

# --- loss
q = model(x)
scores = (q @ q.transpose(1, 2)) / 6 ** 0.5
scores = scores.masked_fill(padding[:, None, :], float("-inf"))
out = $softmax @ q  # bad
loss = out.float().square().mean()
