# expect: tried, and it runs, in place of 

class Stack(nn.Module):
    def __init__(self, n=2, w=6):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(w, w) for _ in range(n))
        self.out = nn.Linear(w, 1)
    def forward(self, xs):
        hs = [torch.zeros(xs.shape[1], 6) for _ in self.cells]
        for x in xs:
            for i, cell in enumerate(self.cells):
                hs[i] = cell(x, hs[i])  #!
                x = hs[i]
        return self.out(x)
net = Stack().bfloat16()
opt = torch.optim.SGD(net.parameters(), lr=.1)
for i in range(3):
    loss = net(torch.randn(4, 2, 6).bfloat16()).float().square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
