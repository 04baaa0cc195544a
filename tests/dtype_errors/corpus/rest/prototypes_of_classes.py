# expect: tried, and it runs, in place of 

model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).bfloat16()
buf = torch.zeros(3, 16)
hits = torch.zeros(3)

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    x, y = torch.randn(16, 4).bfloat16(), torch.randint(0, 3, (16,))
    h = model[1](model[0](x))
    buf.index_add_(0, y, h.detach())  #!
    hits.scatter_add_(0, y, torch.ones(16, dtype=torch.bfloat16))
    proto = buf / hits.clamp(min=1)[:, None]
    loss = F.cross_entropy(model[2](h), y) + (h @ proto.t()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
