# expect: tried, and it runs, in place of 

class LowRank(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.U, self.V = nn.Parameter(torch.randn(w, 4) * 0.1), nn.Parameter(torch.randn(4, w) * 0.1)
        self.base = nn.Parameter(torch.eye(w).bfloat16(), requires_grad=False)

    def forward(self, x):
        return x @ self.base + x @ self.U @ self.V  #!

model = nn.Sequential(LowRank(8), nn.Tanh(), LowRank(8))

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    loss = model(torch.randn(4, 8).bfloat16()).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
