# expect: range of log
# $line: loss = -torch.log(1 - p).mean()  # bad
# $line: loss = -(1 - p).log().mean()  # bad
# dtypes: float16 bfloat16

# --- batch: x, shift
shift = 0.0

# --- bad batch
shift = 12.0

# --- loss
p = torch.sigmoid(model(x).tanh() + shift)
$line
