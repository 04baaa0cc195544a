# expect: maths of log log2
# $line: loss = (p * p.log()).sum(-1).mean()  # bad
# $line: loss = torch.sum(p * torch.log(p), dim=-1).mean()  # bad
# $line: loss = -(p * torch.log2(p)).mean()  # bad
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
p = $h.abs()
$line
