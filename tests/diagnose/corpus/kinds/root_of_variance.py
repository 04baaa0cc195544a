# expect: maths of sqrt pow
# $call: $h.var(dim=-1).sqrt()
# $call: torch.sqrt($h.var(-1))
# $call: $h.var(1) ** 0.5
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
loss = ($call).mean()  # bad
