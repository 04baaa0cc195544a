# expect: maths of div_
# dtypes: none bfloat16
# inputs: 4
# outputs: 4

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x).float() * keep
p = h.abs() * 1.0
p /= p.detach().sum(-1, keepdim=True)  # bad
loss = p.mean()
