# expect: tried, and it runs, in place of 

class Memory(nn.Module):
    def __init__(self, n, w):
        super().__init__()
        self.enc, self.dec = nn.Linear(3, w), nn.Linear(w, 3)
        self.register_buffer("bank", torch.zeros(n, w))
    def forward(self, x, ids):
        h = self.enc(x)
        with torch.no_grad():
            self.bank[ids] = h  #!
        near = self.bank[ids.roll(1)]
        return self.dec(h + near)

model = Memory(10, 8)
opt = torch.optim.Adam(model.parameters())
for step in range(3):
    x, ids = torch.randn(4, 3), torch.randperm(10)[:4]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(model(x, ids), x)
    opt.zero_grad(); loss.backward(); opt.step()
