# expect: maths of div mm bmm
# inputs: 6

# --- setup
model = nn.Linear(6, 6)

# --- batch: x, width
x, width = torch.randn(2, 5, 6), 6

# --- bad batch
width = 0

# --- loss
q = model(x)
scores = q @ q.transpose(1, 2) / width ** 0.5  # bad
loss = (scores.softmax(-1) @ q).float().square().mean()
