# expect: maths of div
# $name: temperature
# $name: tau
# $name: T
# $line: p = (model(x).float() / $name).softmax(-1)  # bad
# $line: p = torch.softmax(model(x).float() / $name, dim=-1)  # bad
# $line: p = F.gumbel_softmax(model(x).float(), tau=$name)  # bad

# --- batch: x, $name
$name = 1.0

# --- bad batch
$name = 0.0

# --- loss
$line
loss = p.square().mean()
