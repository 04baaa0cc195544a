# expect: range of mm bmm matmul
# dtypes: none
# inputs: 8

# --- setup
model = nn.Linear(8, 8).half()

# --- batch: x, gain
x, gain = torch.randn(2, 5, 8).half(), 1.0

# --- bad batch
gain = 2e3

# --- loss
q = model(x * gain)
scores = q @ q.transpose(-1, -2)  # bad
loss = (scores.float().softmax(-1).to(q.dtype) @ q).float().abs().mean() / gain
