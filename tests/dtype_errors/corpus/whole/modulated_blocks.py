# expect: tried, and it runs, in place of 

from torch.utils.checkpoint import checkpoint
class Mod(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.ff, self.ada = nn.Sequential(nn.Linear(w, w), nn.GELU()), nn.Linear(w, 2 * w)
    def forward(self, x, t):
        s, b = self.ada(t).chunk(2, -1)  #!
        return x + self.ff(x * (1 + s[:, None]) + b[:, None])

class DiT(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Mod(w) for _ in range(2)), nn.Linear(w, w)
    def temb(self, t):
        f = torch.exp(torch.arange(4) * -1.0)
        a = t[:, None].float() * f
        return torch.cat([a.sin(), a.cos()], -1)
    def forward(self, x, t):
        t = self.temb(t)
        for b in self.blocks:
            x = checkpoint(b, x, t, use_reentrant=False)
        return self.out(x)

model = DiT().to(torch.bfloat16)
opt = torch.optim.AdamW(model.parameters())
for step in range(3):
    x, t = torch.randn(2, 4, 8).bfloat16(), torch.randint(0, 100, (2,))
    noise = torch.randn_like(x)
    loss = F.mse_loss(model(x, t).float(), noise.float())
    opt.zero_grad(); loss.backward(); opt.step()
