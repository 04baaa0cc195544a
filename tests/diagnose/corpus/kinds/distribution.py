# expect: maths of div pow mul
# $name: Normal
# $name: Laplace
# $name: Cauchy
# dtypes: none
# inputs: 4

# --- setup
model = nn.Linear(4, 8)

# --- batch: x, y, shift
y = torch.randn(x.shape[0], 4)
shift = 0.0

# --- bad batch
shift = -95.0

# --- loss
mean, raw = model(x).chunk(2, -1)
scale = torch.exp(raw + shift)
policy = torch.distributions.$name(mean, scale)
loss = -policy.log_prob(y).mean()  # bad
