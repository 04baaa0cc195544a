# expect: maths of exp mul
# dtypes: none bfloat16
# inputs: 4

# --- setup
model = nn.Linear(4, 4)

# --- batch: x, gain
gain = 0.1

# --- bad batch
gain = 300.0

# --- loss
a = model(x).float().abs() + 0.5
decay = torch.exp(gain * a)  # bad
h = torch.zeros_like(a)
for _ in range(3):
    h = decay * h + a
loss = h.mean()
