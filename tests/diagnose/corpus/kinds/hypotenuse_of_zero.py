# expect: maths of hypot
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
loss = torch.hypot($h[:, 0], $h[:, 1]).mean()  # bad
