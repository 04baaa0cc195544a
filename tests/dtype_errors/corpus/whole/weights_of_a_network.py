# expect: tried, and it runs, in place of 

class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen, self.emb = nn.Linear(3, 4 * 5 + 4), nn.Embedding(6, 3)
        self.head = nn.Linear(4, 2).half()
    def forward(self, x, task):
        w = self.gen(self.emb(task))
        weight, bias = w[:20].view(4, 5), w[20:]
        return self.head(F.linear(x, weight, bias).relu())  #!
net = Hyper()
opt = torch.optim.Adam(net.parameters(), eps=1e-4)
for i in range(3):
    x, t = torch.randn(6, 5).half(), torch.tensor(i)
    loss = F.cross_entropy(net(x, t).float(), torch.randint(0, 2, (6,)))
    opt.zero_grad(); loss.backward(); opt.step()
