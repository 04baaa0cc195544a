# expect: tried, and it runs, in place of 

class GAT(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.w, self.a = nn.Linear(i, o), nn.Linear(2 * o, 1)
    def forward(self, x, ei):
        h = self.w(x)
        s, d = ei
        e = F.leaky_relu(self.a(torch.cat([h[s], h[d]], -1))).squeeze(-1)
        e = e.exp()
        z = torch.zeros(len(x)).scatter_add(0, d, e)  #!
        al = e / z[d].clamp(min=1e-6)
        return torch.zeros(len(x), h.shape[1]).index_add(0, d, h[s] * al[:, None])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.g1, self.g2 = GAT(5, 8), GAT(8, 3)
    def forward(self, x, ei):
        return self.g2(F.elu(self.g1(x, ei)), ei)
net = Net()
opt = torch.optim.Adam(net.parameters())
ei = torch.randint(0, 10, (2, 30))
for step in range(3):
    x, y = torch.randn(10, 5), torch.randint(0, 3, (10,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(net(x, ei), y)
    opt.zero_grad(); loss.backward(); opt.step()
