# expect: maths of logaddexp logsumexp logcumsumexp masked_fill
# $call: torch.logaddexp(s, s.flip(0))
# $call: torch.logsumexp(s, dim=-1)
# $call: s.logsumexp(-1)
# $call: torch.logcumsumexp(s, dim=-1)[:, -1]
# dtypes: none bfloat16
# outputs: 4

# --- batch: x, mask
mask = torch.zeros(x.shape[0], 4, dtype=torch.bool)

# --- bad batch
mask[:] = True

# --- loss
s = model(x).float().masked_fill(mask, -math.inf)  # bad
loss = $call.mean()  # bad
