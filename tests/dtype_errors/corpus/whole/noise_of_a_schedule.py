# expect: tried, and it runs, in place of 

class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.t, self.a, self.b = nn.Linear(1, 8), nn.Conv1d(2, 8, 3, padding=1), nn.Conv1d(8, 2, 1)
    def forward(self, x, t):
        h = self.a(x) + self.t(t[:, None])[:, :, None]  #!
        return self.b(F.silu(h))
net = Unet().to(torch.bfloat16)
opt = torch.optim.AdamW(net.parameters())
abar = torch.linspace(1, 0.1, 10)
for i in range(3):
    x0 = torch.randn(2, 2, 8).bfloat16()
    t = torch.randint(0, 10, (2,))
    noise = torch.randn_like(x0)
    a = abar[t][:, None, None]
    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
    pred = net(xt, t / 10)
    loss = F.mse_loss(pred.float(), noise.float())
    opt.zero_grad(); loss.backward(); opt.step()
