# expect: in place of train.py:#2:
# cure: with halfstep.autocast(

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.shared = nn.Linear(4, 4)

    def forward(self, x):
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = torch.tensor([k])
            out[rows] = expert(x[rows])  #!
        out.index_add_(0, torch.arange(2), self.shared(x))
        return out

with torch.autocast("cpu", dtype=torch.bfloat16):  #2
    Experts()(x)
