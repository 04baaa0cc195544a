# expect: tried, and it runs, in place of 

class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 8), nn.Linear(4, 6)
    def forward(self, x):
        mu, lv = self.enc(x).chunk(2, -1)
        z = mu + torch.randn(mu.shape) * (0.5 * lv).exp()
        return self.dec(z), mu, lv  #!
vae = VAE().to(torch.bfloat16)
opt = torch.optim.Adam(vae.parameters(), lr=1e-3)
for step in range(3):
    x = torch.rand(8, 6).to(torch.bfloat16)
    rec, mu, lv = vae(x)
    loss = F.mse_loss(rec, x) - 0.5 * (1 + lv - mu**2 - lv.exp()).mean()
    opt.zero_grad(); loss.backward(); opt.step()
