# expect: tried, and it runs, in place of 

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(50, 8, mode="sum"), nn.Linear(8, 2)
    def forward(self, ids, w):
        return self.fc(self.bag(ids, per_sample_weights=w))  #!

model = Tagger().half()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    ids = torch.randint(0, 50, (4, 6))
    w = torch.softmax(torch.randn(4, 6), 1)
    loss = F.cross_entropy(model(ids, w).float(), torch.randint(0, 2, (4,)))
    opt.zero_grad(); loss.backward(); opt.step()
