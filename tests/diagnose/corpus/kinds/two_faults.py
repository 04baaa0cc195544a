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
a = torch.log(h.abs()).mean()  # bad
b = (h / h.abs().sum()).mean()  # bad
loss = a + b
