# expect: maths of div log
# $var: var
# $var: sigma2
# $var: variance
# inputs: 5
# outputs: 6

# --- setup
model = nn.Linear(5, 6)
nn.init.ones_(model.weight)

# --- batch: x, y
y = torch.randn(x.shape[0], 3)

# --- bad batch
x = x * 0 - 1e3

# --- loss
mean, raw = model(x).chunk(2, -1)
$var = torch.relu(raw.float() + 20)
loss = (0.5 * ((y - mean) ** 2 / $var + $var.log())).mean()  # bad
