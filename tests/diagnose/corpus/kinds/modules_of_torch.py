# expect: maths of _softmax _log_softmax
# $layer, $sign: nn.Softmax(dim=-1);
# $layer, $sign: nn.LogSoftmax(dim=-1);
# $layer, $sign: nn.Softmin(dim=-1); -
# dtypes: none bfloat16
# inputs: 4

# --- setup
model = nn.Linear(4, 4)
normalize = $layer

# --- batch: x, mask
mask = torch.zeros(x.shape[0], 4, dtype=torch.bool)

# --- bad batch
mask[1] = True

# --- loss
scores = model(x).float().masked_fill(mask, -math.inf)
loss = normalize(${sign}scores).clamp_min(-9).square().mean()  # bad
