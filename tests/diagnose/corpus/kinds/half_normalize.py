# expect: range of div clamp_min
# $call: F.normalize(h, dim=-1)
# $call: F.normalize(h)
# dtypes: none
# inputs: 4

# --- setup
model = nn.Linear(4, 5, bias=False).half()

# --- batch: x, gain
x, gain = x.half(), 1.0

# --- bad batch
gain = 0.0

# --- loss
h = model(x) * gain
loss = $call.float().sum()  # bad
