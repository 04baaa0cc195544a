# expect: maths of exp
# $logvar: logvar
# $logvar: log_var
# $logvar: lv
# dtypes: none bfloat16
# outputs: 8

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 1e5

# --- loss
mu, $logvar = model(x).chunk(2, dim=-1)
$logvar = $logvar.abs() * gain
loss = -0.5 * (1 + $logvar - mu.pow(2) - $logvar.exp()).sum(-1).mean()  # bad
