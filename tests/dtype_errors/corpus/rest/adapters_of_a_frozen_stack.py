# expect: x: bfloat16 [2, 4], of line
# cure: return self.base(x.to(torch.bfloat16)) + self.up(change)
# expect: in place of train.py:#2:
# cure: with torch.autocast("cpu", torch.bfloat16):

class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 4)
        self.base, self.down = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 2)

    def forward(self, x):
        change = self.down(x)  #!
        return self.base(x) + self.up(change)

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Adapter(), nn.ReLU(), Adapter())

    def forward(self, x):
        return x + self.layers(x)

stack, x = Stack(), x.bfloat16()
stack(x)  #2
