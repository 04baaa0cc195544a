# expect: maths of _linalg_eigh _linalg_svd linalg_eigh
# $call: torch.linalg.eigh(c)[1]
# $call: torch.linalg.svd(c)[0]
# $call: torch.linalg.eigh(c).eigenvectors
# dtypes: none
# inputs: 3

# --- setup
model = nn.Linear(3, 3)

# --- batch: x, mix
mix = 1.0

# --- bad batch
mix = 0.0

# --- loss
h = model(x)
c = mix * (h.t() @ h) + torch.eye(3)
loss = $call[0].pow(3).sum()  # bad
