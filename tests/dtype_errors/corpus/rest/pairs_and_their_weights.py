# expect: same: bool [16], of line #1: same = a % 2 == b % 2
# cure: same.to(torch.bfloat16)

model = nn.Bilinear(4, 4, 1).to(torch.bfloat16)
table = torch.randn(9, 4, dtype=torch.bfloat16)
weight = torch.linspace(0, 1, 16, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    a, b = torch.randint(9, (2, 16))
    same = a % 2 == b % 2  #1
    score = model(table[a], table[b]).squeeze(1).sigmoid()
    loss = F.binary_cross_entropy(score, same, weight)  #!
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
