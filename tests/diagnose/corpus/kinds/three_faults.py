# expect: maths of log div sqrt
# dtypes: none bfloat16
# inputs: 4
# outputs: 4

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x).float() * keep
p = h.abs()
a = torch.log(p).mean()  # bad
b = p / p.sum()  # bad
loss = a + b.mean() + p.sum(-1).sqrt().mean()  # bad
