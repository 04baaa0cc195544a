# expect: range of bmm mm matmul
# dtypes: float16
# inputs: 8

# --- setup
model = nn.Linear(8, 8)

# --- batch: x, gain
x = torch.randn(2, 5, 8)
gain = 1.0

# --- bad batch
gain = 1e3

# --- loss
q = model(x * gain)
scores = q @ q.transpose(-1, -2)  # bad
loss = (scores.softmax(-1) @ q).float().abs().mean() / gain
