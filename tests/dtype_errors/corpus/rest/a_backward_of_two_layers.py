# expect: tried, and it runs, in place of 

class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        y = torch.addmm(b, x, w.t())
        ctx.save_for_backward(x, w, y)
        return y * torch.sigmoid(y)

    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        s = torch.sigmoid(y)
        g = g * (s + y * s * (1 - s))
        return g.mm(w), g.t().mm(x), g.sum(0)  #!

class Layer(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(b, a) * 0.1), nn.Parameter(torch.zeros(b))

    def forward(self, x):
        return Swish.apply(x, self.w, self.b)

model = nn.Sequential(Layer(8, 16), Layer(16, 3))

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    x, y = torch.randn(10, 8), torch.randint(0, 3, (10,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
