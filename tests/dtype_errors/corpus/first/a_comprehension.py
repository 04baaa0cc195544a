# expect: h: float32 [2, 4], of line 12: x = torch.randn
# expect: heads.1.weight of Heads: float16

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2).half()])

    def forward(self, h):
        return torch.cat([head(h) for head in self.heads])  #!

Heads()(x)
