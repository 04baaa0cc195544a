# expect: maths of pow mul square
# $call: q.pow(2)
# $call: q ** 2
# $call: q.square()
# $call: q * q
# dtypes: none
# inputs: 4

# --- setup
model = nn.Linear(4, 4)

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 1e25

# --- loss
q = gain * model(x)
loss = ($call).mean()  # bad
