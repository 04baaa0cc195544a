# expect: x: bfloat16 [2, 4], of line
# expect: in place of x (then line #3 fails)
# expect: autocast("cpu", torch.bfloat16) at line #2

class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 4)
        self.base, self.down = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 2)

    def forward(self, x):
        change = self.down(x)  #!
        return self.base(x) + self.up(change)  #3

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Adapter(), nn.ReLU(), Adapter())

    def forward(self, x):
        return x + self.layers(x)

stack, x = Stack(), x.bfloat16()
stack(x)  #2
