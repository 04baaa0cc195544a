# expect: tried, and it runs, in place of 

class Int8Linear(nn.Module):
    def __init__(self, lin):
        super().__init__()
        s = lin.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("q", (lin.weight / s).round().to(torch.int8))
        self.register_buffer("s", s.detach())
        self.bias = lin.bias
    def forward(self, x):
        w = self.q.to(x.dtype) * self.s
        return F.linear(x, w, self.bias)  #!

model = nn.Sequential(Int8Linear(nn.Linear(6, 12)), nn.ReLU(), Int8Linear(nn.Linear(12, 12)), nn.ReLU(), nn.Linear(12, 2).half())
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(3):
    x, y = torch.randn(8, 6).half(), torch.randint(0, 2, (8,))
    out = model(x)
    loss = F.cross_entropy(out.float(), y)
    opt.zero_grad(); loss.backward(); opt.step()
