# expect: tried, and it runs, in place of 

class IA3(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.ones(base.out_features))
    def forward(self, x):
        return self.base(x) * self.scale

class Block(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(w), IA3(nn.Linear(w, 2 * w)), nn.Linear(2 * w, w)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))  #!

model = nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), nn.Linear(16, 3)).to(torch.bfloat16)
for m in model.modules():
    if isinstance(m, IA3):
        m.scale.data = m.scale.data.float()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    x, y = torch.randn(8, 8, dtype=torch.bfloat16), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
