# expect: h: float32 [2, 4], of line 12
# expect: self.weight: float16 [8, 4], a parameter, table.weight

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4).half()

    @property
    def weight(self):
        return self.table.weight

    def forward(self, h):
        return F.linear(input=h, weight=self.weight, bias=None)  #!

Tied()(x)
