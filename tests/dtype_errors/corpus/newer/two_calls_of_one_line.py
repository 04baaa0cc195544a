# expect: x: float32 [2, 4], of line 12
# expect: b.weight of Gate: float16 [4, 4]

class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4).half()

    def forward(self, x):
        return self.a(x) * torch.sigmoid(self.b(x))  #!

Gate()(x)
