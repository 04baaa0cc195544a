# expect: self.proj(x): float16 [2, 4]
# expect: self.embed.weight.T: float32 [4, 8], a parameter, embed.weight of Tied

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.proj = nn.Embedding(8, 4), nn.Linear(4, 4).half()

    def forward(self, x):
        return self.proj(x) @ self.embed.weight.T  #!

Tied()(half)
