# expect: maths of log
# dtypes: none bfloat16
# inputs: 4
# outputs: 4

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x).float() * keep
loss = (
    h.abs()
    .log()  # bad
    .mean()
)
