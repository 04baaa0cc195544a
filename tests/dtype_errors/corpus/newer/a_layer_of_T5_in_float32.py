# thread: zai-org/CogVideo 170
# expect: hidden: float32 [2, 4]
# expect: 1.norm.weight of Sequential: float16 [4]

class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, hidden):
        hidden = self.wi(hidden).relu()
        if hidden.dtype != self.wo.weight.dtype:
            hidden = hidden.to(self.wo.weight.dtype)
        return self.wo(hidden)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(4), Dense()

    def forward(self, hidden):
        return hidden + self.dense(self.norm(hidden))  #!

encoder = nn.Sequential(Block(), Block()).half()
for block in encoder:
    block.dense.wo.float()
encoder(half)
