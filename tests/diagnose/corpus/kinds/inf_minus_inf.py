# expect: maths of sub
# $line: w = torch.exp(s - s.amax(-1, keepdim=True))  # bad
# $line: w = (s - s.max(dim=-1, keepdim=True).values).exp()  # bad
# outputs: 4

# --- batch: x, mask
mask = torch.zeros(x.shape[0], 4, dtype=torch.bool)

# --- bad batch
mask[0] = True

# --- loss
s = model(x).float().masked_fill(mask, -math.inf)
$line
loss = (w / w.sum(-1, keepdim=True)).square().mean()
