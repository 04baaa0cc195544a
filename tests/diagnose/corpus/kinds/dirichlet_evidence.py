# expect: maths of lgamma digamma
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
alpha = $h.abs()
total = alpha.sum(-1)
terms = torch.lgamma(alpha).sum(-1)  # bad
loss = (torch.lgamma(total + 1) - terms).mean()
