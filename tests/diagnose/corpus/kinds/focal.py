# expect: maths of log
# $gamma: 2
# $gamma: 1.5
# $gamma: 0.5
# dtypes: none

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 1e5

# --- loss
p = (gain * model(x)).softmax(-1)
weight = (1 - p.detach()) ** $gamma
loss = -(weight * p.log()).sum(-1).mean()  # bad
