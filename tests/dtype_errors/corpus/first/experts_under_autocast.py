# expect: out: float32 [2, 4], of line #1: out = torch.zeros_like(x)

class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        out = torch.zeros_like(x)  #1
        for i, expert in enumerate(self.experts):
            rows = torch.tensor([i])
            out[rows] = expert(x[rows])  #!
        return out

with torch.autocast("cpu", torch.bfloat16):
    Moe()(x)
