# expect: inside: bool [4, 1], of line #1: inside = points.norm(dim=1, keepdim=True) < 1
# cure: (scores.sigmoid() - inside.to(torch.float32))

model, points = nn.Linear(2, 1), torch.randn(4, 2)
inside = points.norm(dim=1, keepdim=True) < 1  #1
scores = model(points)
loss = (scores.sigmoid() - inside).square().mean()  #!
loss.backward()
recall = (scores[inside] > 0).sum()
