# expect: tried, and it runs, in place of 

class LM(nn.Module):
    def __init__(self, v=20, w=8):
        super().__init__()
        self.emb = nn.Embedding(v, w)
        self.mix = nn.Linear(w, w)
        self.norm = nn.LayerNorm(w)
    def forward(self, ids):
        h = self.norm(self.mix(self.emb(ids)).float())
        return F.linear(h, self.emb.weight)  #!

model = LM().to(torch.bfloat16)
model.norm.float()
opt = torch.optim.AdamW(model.parameters())
for step in range(3):
    ids = torch.randint(0, 20, (2, 7))
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad(); loss.backward(); opt.step()
