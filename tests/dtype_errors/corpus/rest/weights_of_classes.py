# expect: tried, and it runs, in place of 

model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).bfloat16()
weights = torch.tensor([1.0, 2.0, 0.5])
criterion = nn.CrossEntropyLoss(weight=weights)

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    x, y = torch.randn(8, 4).bfloat16(), torch.randint(0, 3, (8,))
    logits = model(x)
    loss = criterion(logits, y)  #!
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
