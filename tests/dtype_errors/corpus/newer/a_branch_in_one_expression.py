# expect: float32 [2, 4]
# expect: proj.weight of Net: bfloat16 [4, 4]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.skip = nn.Linear(4, 4).bfloat16(), None

    def forward(self, x):
        h = x if self.skip is None else self.skip(x)  #1
        out = self.proj(h if h.dim() == 2 else h.flatten(1))  #!
        return out

Net()(x)
