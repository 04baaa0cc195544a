# expect: tried, and it runs, in place of 

from torch.utils.checkpoint import checkpoint

class Adapter(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.down, self.up = nn.Linear(w, 4), nn.Linear(4, w)

    def forward(self, x):
        return x + self.up(F.relu(self.down(x)))  #!

class Block(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.lin, self.adapter = nn.Linear(w, w).bfloat16(), Adapter(w)

    def forward(self, x):
        return self.adapter(F.gelu(self.lin(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.blocks, self.out = nn.Linear(4, 16).bfloat16(), nn.ModuleList(Block(16) for _ in range(2)), nn.Linear(16, 2)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = checkpoint(b, h, use_reentrant=False)
        return self.out(h)

model = Net()

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    x, y = torch.randn(8, 4).bfloat16(), torch.randint(0, 2, (8,))
    loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
