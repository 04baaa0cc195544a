# expect: maths of log sqrt reciprocal abs
# $branch: $h.abs().log()
# $branch: torch.log($h.abs())
# $branch: $h.abs().sqrt()
# $branch: 1 / $h.abs()
# $h: h
# $h: z
# $h: feats
# dtypes: none bfloat16

# --- batch: x, keep
keep = torch.ones(x.shape[0], 1)

# --- bad batch
keep[0] = 0

# --- loss
$h = model(x).float() * keep
y = torch.where($h.abs() > 0, $branch, torch.zeros_like($h))  # bad
loss = y.mean()
