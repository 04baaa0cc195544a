# expect: maths of div sqrt
# $norm: z.norm(dim=-1, keepdim=True)
# $norm: z.pow(2).sum(-1, keepdim=True).sqrt()
# dtypes: none bfloat16
# inputs: 4
# outputs: 4

# --- setup
model = nn.Linear(4, 4)


class Criterion(nn.Module):
    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = weight

    def forward(self, z):
        length = $norm  # bad
        return self.weight * (z / length).mean()  # bad


criterion_module = Criterion()

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x).float() * keep
loss = criterion_module(h)
