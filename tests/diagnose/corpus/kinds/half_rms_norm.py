# expect: range of pow mul square mean
# $square: h.pow(2)
# $square: h * h
# $square: h.square()
# $width: 4 to 9
# dtypes: none
# inputs: 4

# --- setup
class Layer(nn.Module):
    def forward(self, h):
        return h * (($square).mean(-1, keepdim=True) + 1)  # bad


model = nn.Sequential(nn.Linear(4, $width), Layer(), nn.Linear($width, 2)).half()

# --- batch: x, gain
x, gain = x.half(), 1.0

# --- bad batch
gain = 3e3

# --- loss
loss = model(x * gain).float().abs().log1p().mean()
