# expect: data of $name.weight
# $name: teacher
# $name: ema
# $name: target_net
# inputs: 4

# --- setup
model = nn.Linear(4, 3)
$name = nn.Linear(4, 3)

# --- batch: x

# --- bad batch
nn.init.constant_($name.weight, math.nan)

# --- loss
with torch.no_grad():
    goal = $name(x)  # bad
loss = F.mse_loss(model(x), goal)
