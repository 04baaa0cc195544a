# expect: maths of mul add mm addmm
# dtypes: none
# inputs: 4

# --- setup
model = nn.Linear(4, 4)

# --- batch: x, rate
rate = 0.5

# --- bad batch
rate = 30.0

# --- loss
h = model(x)
for _ in range(40):
    h = rate * h + x  # bad
loss = h.abs().mean()
