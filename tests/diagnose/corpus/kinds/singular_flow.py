# expect: maths of _linalg_slogdet log _linalg_det
# $call: torch.linalg.slogdet(w)[1]
# $call: torch.logdet(w)
# $call: w.slogdet().logabsdet
# $call: w.det().log()
# dtypes: none
# inputs: 4

# --- setup
model = nn.Linear(4, 4)
nn.init.eye_(model.weight)

# --- batch: x, keep
keep = torch.ones(4, 1)

# --- bad batch
keep[2] = 0

# --- loss
w = model.weight * keep
log_det = $call  # bad
loss = model(x).square().mean() - log_det
