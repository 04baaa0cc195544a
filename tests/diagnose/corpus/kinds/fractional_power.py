# expect: maths of pow sqrt
# $power: 0.5
# $power: 0.3
# $power: (1 / 2.2)
# $form: $h.abs() ** $power
# $form: $h.abs().pow($power)
# $form: torch.pow($h.abs(), $power)
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
loss = ($form).mean()  # bad
