# expect: hidden: float32 [2, 4], of line #1: normed = norm(x)
# expect: up.weight of Block: float16

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8).half()

    def forward(self, hidden):
        return checkpoint(self.mlp, hidden, use_reentrant=False)

    def mlp(self, hidden):
        return self.up(hidden)  #!

norm = nn.LayerNorm(4)
normed = norm(x)  #1
Block()(normed)
