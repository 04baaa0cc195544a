# expect: target: int64 [4, 3], of line #1
# cure: target.to(torch.float32)

model, criterion = nn.Linear(4, 3), nn.BCEWithLogitsLoss()
ids = torch.tensor([0, 2, 1, 0])
target = F.one_hot(ids, 3)  #1
for _ in range(2):
    logits = model(torch.randn(4, 4))
    loss = criterion(logits, target)  #!
    loss.backward()
    hits = ((logits > 0) == target.bool()).float().mean()
