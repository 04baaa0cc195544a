# expect: range of pow square mul mean
# dtypes: float16
# inputs: 4

# --- setup
class Norm(nn.Module):
    def forward(self, h):
        return h * (h * h).mean(-1, keepdim=True)  # bad


model = nn.Sequential(nn.Linear(4, 8), Norm(), nn.Linear(8, 2))

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 3e3

# --- loss
loss = model(x * gain).float().abs().log1p().mean()
