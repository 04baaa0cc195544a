# expect: tried, and it runs, in place of 

class Head(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(w), nn.Linear(w, 1)
    def forward(self, h):
        with torch.autocast("cpu", enabled=False):
            return self.proj(self.norm(h))  #!

body, head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), Head(8)
opt = torch.optim.Adam([*body.parameters(), *head.parameters()])
for step in range(3):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = body(x)
        loss = F.mse_loss(head(h), y)
    opt.zero_grad(); loss.backward(); opt.step()
