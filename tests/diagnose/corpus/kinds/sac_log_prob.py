# expect: maths of log
# $action: action
# $action: a
# $action: squashed
# dtypes: none

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 1e4

# --- loss
$action = torch.tanh(gain * model(x))
logp = -torch.log(1 - $action.pow(2)).sum(-1)  # bad
loss = logp.mean()
