# expect: tried, and it runs, in place of 

class Rope(nn.Module):
    def __init__(self, d, n=32):
        super().__init__()
        f = 1.0 / 10000 ** (torch.arange(0, d, 2) / d)
        t = torch.outer(torch.arange(n).float(), f)
        self.cos, self.sin = t.cos(), t.sin()
    def forward(self, x):
        a, b = x.chunk(2, -1)
        c, s = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        return torch.cat([a * c - b * s, a * s + b * c], -1)
class Attn(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(w, w) for _ in range(4))
        self.rope = Rope(w)
    def forward(self, x):
        q, k, v = self.rope(self.q(x)), self.rope(self.k(x)), self.v(x)
        s = torch.einsum("btd,bsd->bts", q, k) / 8**0.5
        return self.o(torch.bmm(s.softmax(-1), v))  #!
model = nn.Sequential(nn.Embedding(10, 8), Attn(), nn.Linear(8, 10)).half()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    ids = torch.randint(0, 10, (2, 6))
    loss = F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
    opt.zero_grad(); loss.backward(); opt.step()
