# expect: range of add
# dtypes: float16
# inputs: 6

# --- setup
model = nn.Linear(6, 6)

# --- batch: x, padding, other
x = torch.randn(2, 5, 6)
padding = other = torch.zeros(2, 1, 5)

# --- bad batch
padding[0] = 1

# --- loss
q = model(x)
low = torch.finfo(q.dtype).min
mask = padding.to(q.dtype) * low + other.to(q.dtype) * low  # bad
out = ((q @ q.transpose(1, 2)) + mask).softmax(-1) @ q
loss = out.float().square().mean()
