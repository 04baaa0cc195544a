# expect: maths of digamma lgamma
# $name: digamma
# $name: lgamma
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
loss = torch.$name($h.abs()).mean()  # bad
