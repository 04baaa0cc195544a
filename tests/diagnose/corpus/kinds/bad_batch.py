# expect: data of x
# $value: math.nan
# $value: math.inf
# $value: -math.inf

# --- batch: x

# --- bad batch
x[1, 0] = $value

# --- loss
loss = model(x).float().mean()  # bad
