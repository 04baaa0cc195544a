# expect: maths of log
# $name: scale
# $name: s
# $name: slope
# inputs: 6

# --- setup
model = nn.Linear(6, 12)

# --- batch: x, gate
gate = 1.0

# --- bad batch
gate = 0.0

# --- loss
raw, shift = model(x).float().chunk(2, -1)
$name = torch.sigmoid(raw) * gate
z = x * $name + shift
log_det = torch.log($name).sum(-1)  # bad
loss = (0.5 * z.square().sum(-1) - log_det).mean()
