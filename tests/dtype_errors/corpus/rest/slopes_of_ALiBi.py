# expect: tried, and it runs, in place of 

class Attn(nn.Module):
    def __init__(self, w=16, heads=2):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(w, 3 * w), nn.Linear(w, w), heads

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).flatten(1, 2)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1)
        alibi = (slopes[:, None, None] * torch.arange(t)).repeat(b, 1, 1)
        scores = torch.baddbmm(alibi, q, k.transpose(1, 2), beta=1.0, alpha=q.shape[-1] ** -0.5)  #!
        probs = F.softmax(scores, dim=-1, dtype=torch.float32)
        ctx = torch.bmm(probs, v).view(b, self.heads, t, -1)
        return self.out(ctx.transpose(1, 2).reshape(b, t, w))

model = nn.Sequential(nn.Linear(4, 16), Attn(), nn.Linear(16, 2)).bfloat16()

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    loss = model(torch.randn(3, 5, 4).bfloat16()).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
