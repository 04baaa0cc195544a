# expect: maths of std_mean var_mean
# $call: torch.std_mean(h, dim=0)
# $call: torch.var_mean(h, dim=0)
# dtypes: none

# --- batch: x

# --- bad batch
x = x[:1]

# --- loss
h = model(x)
spread, mean = $call  # bad
loss = (spread + mean).mean()
