# expect: y: int32 [6], of line #1
# cure: nn.CrossEntropyLoss(weight=torch.ones(3))(model(x), y.long())

model = nn.Linear(4, 3)
for _ in range(2):
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,), dtype=torch.int32)  #1
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))(model(x), y)  #!
    loss.backward()
