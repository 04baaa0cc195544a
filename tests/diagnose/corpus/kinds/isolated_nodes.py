# expect: maths of pow rsqrt reciprocal mul
# $power: degree.pow(-0.5)
# $power: degree ** -0.5
# $power: degree.rsqrt()
# $power: 1 / degree.sqrt()
# dtypes: none bfloat16
# inputs: 6

# --- setup
model = nn.Linear(6, 6)

# --- batch: x, adjacency
x = torch.randn(4, 6)
adjacency = torch.ones(4, 4)

# --- bad batch
adjacency[1] = 0
adjacency[:, 1] = 0

# --- loss
degree = adjacency.sum(-1)
scale = $power  # bad
h = (scale[:, None] * adjacency * scale) @ model(x)
loss = h.float().square().mean()
