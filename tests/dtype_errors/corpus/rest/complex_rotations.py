# expect: tried, and it runs, in place of 

def rope(x, freqs):
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))  #!
    return torch.view_as_real(z * freqs).flatten(-2)

class Attn(nn.Module):
    def __init__(self, w=16):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(w, w) for _ in range(4))
        t = torch.outer(torch.arange(32.0), 1 / 100 ** torch.linspace(0, 1, w // 2))
        self.freqs = torch.polar(torch.ones_like(t), t)

    def forward(self, x):
        f = self.freqs[: x.shape[1]]
        q, k, v = rope(self.q(x), f), rope(self.k(x), f), self.v(x)
        return self.o(F.scaled_dot_product_attention(q, k, v))

model = nn.Sequential(nn.Linear(4, 16), Attn(), nn.Linear(16, 1)).bfloat16()

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    loss = model(torch.randn(3, 6, 4).bfloat16()).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
