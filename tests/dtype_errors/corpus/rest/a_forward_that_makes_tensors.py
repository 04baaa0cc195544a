# expect: tried, and it runs, in place of 

class MatMulRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        out = torch.zeros(x.shape[0], w.shape[0])
        out.copy_(x @ w.t())
        mask = torch.zeros(x.shape[0], w.shape[0]).index_put((torch.arange(len(x)),), (x @ w.t() > 0).to(x.dtype))  #!
        ctx.save_for_backward(x, w, mask)
        return out * mask

    @staticmethod
    def backward(ctx, g):
        x, w, mask = ctx.saved_tensors
        g = g * mask
        return g @ w, g.t() @ x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.w, self.out = nn.Linear(4, 8), nn.Parameter(torch.randn(8, 8) * 0.3), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(MatMulRelu.apply(self.inp(x), self.w))

model = Net()

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
