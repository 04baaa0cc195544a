# expect: target: float32 [6, 1], of line #1
# cure: target.squeeze(1).long()

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
data = torch.cat([torch.randn(6, 4), torch.tensor([[0.0], [1], [2], [0], [1], [2]])], 1)
for epoch in range(2):
    inputs, target = data[:, :4], data[:, 4:]  #1
    loss = F.cross_entropy(model(inputs), target)  #!
    loss.backward()
