# expect: tried, and it runs, in place of 

class Conv(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.msg, self.upd = nn.Linear(a, b), nn.Linear(a + b, b)

    def forward(self, h, src, dst):
        m = self.msg(h[src]).relu()
        total = torch.zeros(len(h), m.shape[1]).index_add(0, dst, m)  #!
        degree = torch.zeros(len(h)).index_add(0, dst, torch.ones(len(dst)))
        mean = total / degree.clamp(min=1)[:, None]
        return self.upd(torch.cat([h, mean], 1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = Conv(8, 16), Conv(16, 16), nn.Linear(16, 3)

    def forward(self, x, src, dst):
        return self.head(self.b(self.a(x, src, dst).relu(), src, dst))

model = Net()
src, dst = torch.randint(0, 20, (2, 60))

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    x, y = torch.randn(20, 8), torch.randint(0, 3, (20,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x, src, dst), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
