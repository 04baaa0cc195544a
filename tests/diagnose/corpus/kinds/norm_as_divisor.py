# expect: maths of div
# $norm: $h.norm(dim=-1, keepdim=True)
# $norm: torch.linalg.vector_norm($h, dim=1)[:, None]
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
unit = $h / $norm  # bad
loss = unit.sum(-1).square().mean()
