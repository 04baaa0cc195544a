# expect: range of sum mean mul
# dtypes: none
# inputs: 8

# --- setup
model = nn.Linear(8, 8).half()

# --- batch: x, gain
x, gain = torch.randn(40, 8).half(), 1.0

# --- bad batch
gain = 2e4

# --- loss
h = model(x).abs() + 1
loss = (gain * h).sum() / 1e6  # bad
