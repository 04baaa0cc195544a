# expect: tried, and it runs, in place of 

class Dec(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.k, self.q = nn.Linear(w, w), nn.Linear(w, w)
        self.cache = torch.zeros(1, 6, w)
    def step(self, x, pos):
        self.cache = self.cache.detach().index_copy(1, torch.tensor([pos]), self.k(x))  #!
        return torch.softmax(self.q(x) @ self.cache.transpose(1, 2), -1) @ self.cache
net = Dec().half()
opt = torch.optim.SGD(net.parameters(), lr=.1)
for i in range(4):
    y = net.step(torch.randn(1, 1, 8).half(), i)
    loss = y.float().square().sum()
    opt.zero_grad(); loss.backward(); opt.step()
