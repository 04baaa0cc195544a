# expect: maths of div sqrt
# $layer: nn.CosineSimilarity(dim=-1, eps=0.0)
# $layer: nn.CosineSimilarity(eps=0.0)
# dtypes: none bfloat16
# inputs: 4
# outputs: 4

# --- setup
model = nn.Linear(4, 4)
similar = $layer

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x).float() * keep
loss = similar(h, torch.ones_like(h)).mean()  # bad
