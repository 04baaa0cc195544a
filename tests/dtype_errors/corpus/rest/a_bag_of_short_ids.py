# expect: ids: int16 [2, 3], of line #1
# cure: ids.long()

model = nn.Embedding(9, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ids = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int16)  #1
counts = torch.ones(2, 3, dtype=torch.float64)
for step in range(2):
    bags = F.embedding_bag(ids, model.weight, mode="sum", per_sample_weights=counts)  #!
    optimizer.zero_grad()
    bags.square().sum().backward()
    optimizer.step()
