# expect: tried, and it runs, in place of 

class LinearFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return torch.addmm(b, x, w.t())
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x, g.sum(0)  #!

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.w, self.b = nn.Parameter(torch.randn(4, 8) * .1), nn.Parameter(torch.zeros(4))
    def forward(self, x):
        return LinearFn.apply(self.inp(x).relu(), self.w, self.b)

net = Net()
opt = torch.optim.Adam(net.parameters())
for step in range(3):
    x, y = torch.randn(8, 5), torch.randint(0, 4, (8,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
