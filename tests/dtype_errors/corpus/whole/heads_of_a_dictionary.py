# expect: tried, and it runs, in place of 

class Multi(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 8).bfloat16()
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 3)})
    def forward(self, x):
        h = self.body(x).relu()
        return {k: head(h) for k, head in self.heads.items()}  #!
net = Multi()
opt = torch.optim.SGD(net.parameters(), lr=.1)
for i in range(3):
    out = net(torch.randn(4, 5).bfloat16())
    loss = sum(F.cross_entropy(v, torch.zeros(4, dtype=torch.long)) for v in out.values())
    opt.zero_grad(); loss.backward(); opt.step()
