# expect: tried, and it runs, in place of 

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.deep, self.out = nn.Embedding(9, 4), nn.Linear(6, 4).half(), nn.Linear(8, 1).half()
    def forward(self, ids, dense):
        e = self.emb(ids).mean(1)
        d = F.relu(self.deep(dense))  #!
        return self.out(torch.cat([e, d], 1)).squeeze(1)
net = Wide()
opt = torch.optim.SGD(net.parameters(), lr=.1)
crit = nn.BCEWithLogitsLoss()
for epoch in range(2):
    for i in range(2):
        ids, dense, y = torch.randint(0, 9, (4, 3)), torch.randn(4, 6), torch.rand(4).round()
        loss = crit(net(ids, dense), y)
        opt.zero_grad(); loss.backward(); opt.step()
