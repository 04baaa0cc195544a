# expect: tried, and it runs, in place of 

class Attn(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, w)
        self.register_buffer("pos", torch.randn(16, w))
    def forward(self, x):
        t = x.shape[1]
        q, k = self.q(x) + self.pos[:t], self.k(x) + self.pos[:t]
        return F.scaled_dot_product_attention(q, k, self.v(x), is_causal=True)  #!

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.att, self.head = nn.Embedding(20, 8), Attn(), nn.Linear(8, 20)
    def forward(self, ids):
        return self.head(self.att(self.emb(ids)))

model = LM()
for p in model.parameters():
    p.data = p.data.to(torch.bfloat16)
opt = torch.optim.AdamW(model.parameters())
for step in range(3):
    ids = torch.randint(0, 20, (2, 9))
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad(); loss.backward(); opt.step()
