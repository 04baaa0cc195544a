# expect: in place of expert(x[rows]); self.shared(x).to(torch.float32) in place of self.shared(x)
# expect: (then line #1 fails)
# cure: halfstep.autocast in place of torch.autocast at line #2

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
        out.index_add_(0, torch.arange(2), self.shared(x))  #1
        return out

with torch.autocast("cpu", dtype=torch.bfloat16):  #2
    Experts()(x)
