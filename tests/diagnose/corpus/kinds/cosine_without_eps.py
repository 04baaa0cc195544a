# expect: maths of div sqrt
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
loss = F.cosine_similarity($h, torch.ones_like($h), eps=0.0).mean()  # bad
