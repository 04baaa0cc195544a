# expect: maths of pow sqrt log

# --- batch: x, shift
shift = 9.0

# --- bad batch
shift = -9.0

# --- loss
u = model(x).float() + shift
loss = (u ** 0.3).mean() + u.mean()  # bad
