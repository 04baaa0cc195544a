# expect: h: float32 [1, 5, 16], of line
# cure: self.kv(h.to(torch.float16))

torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.q, self.kv, self.o, self.norm = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d), nn.LayerNorm(d)
        self.scale = nn.Parameter(torch.ones(1) * d ** -0.5)
    def forward(self, x, cache=None):
        h = self.norm(x)
        q, (k, v) = self.q(h), self.kv(h).chunk(2, -1)  #!
        if cache is not None: k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        a = F.scaled_dot_product_attention(q * self.scale, k, v)
        return x + self.o(a), (k, v)
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16); self.blocks = nn.ModuleList([Block(), Block()]); self.head = nn.Linear(16, 50)
        self.register_buffer("pos", torch.randn(64, 16), persistent=False)
    def forward(self, ids, caches=None, at=0):
        x = self.emb(ids) + self.pos[at:at + ids.shape[1]]
        new = []
        for i, b in enumerate(self.blocks):
            x, c = b(x, caches[i] if caches else None)
            new.append(c)
        return self.head(x), new
model = LM()
for m in model.modules():
    if isinstance(m, (nn.Linear, nn.Embedding)): m.half()
ids = torch.randint(0, 50, (1, 5))
with torch.no_grad():
    logits, cache = model(ids)
    for at in range(5, 9):
        logits, cache = model(logits[:, -1:].argmax(-1), cache, at)
