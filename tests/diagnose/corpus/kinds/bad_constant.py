# expect: data of $name
# $name: table
# $name: class_weight
# $name: frequencies
# inputs: 4

# --- setup
model = nn.Linear(4, 3)
$name = torch.ones(3)

# --- batch: x

# --- bad batch
$name[1] = math.inf

# --- loss
loss = (model(x).float() * $name).square().mean()  # bad
