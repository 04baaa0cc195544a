# expect: tried, and it runs, in place of 

class Dec(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.att, self.n, self.f = nn.MultiheadAttention(w, 2, batch_first=True), nn.LayerNorm(w), nn.Linear(w, w)
    def forward(self, x, mem):
        a, _ = self.att(x, mem, mem)  #!
        return self.f(self.n(x + a))
enc, dec = nn.Linear(5, 8), Dec().to(torch.bfloat16)
opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()])
for i in range(3):
    mem, x = enc(torch.randn(2, 6, 5)), torch.randn(2, 4, 8).bfloat16()
    loss = dec(x, mem).float().square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
