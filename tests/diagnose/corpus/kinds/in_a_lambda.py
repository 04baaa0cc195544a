# expect: maths of log
# dtypes: none bfloat16
# inputs: 4
# outputs: 4

# --- setup
model = nn.Linear(4, 4)
entropy = lambda p: -(p * p.log()).sum(-1).mean()  # bad

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x).float() * keep
loss = entropy(h.abs())
