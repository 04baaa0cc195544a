# expect: tried, and it runs, in place of 

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.l = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
    def forward(self, x):
        h = F.relu(self.c(x.permute(0, 3, 1, 2)))  #!
        return self.l(h.mean((2, 3)))
net = Net()
opt = torch.optim.Adam(net.parameters())
for i in range(3):
    img, y = torch.randint(0, 255, (2, 8, 8, 3), dtype=torch.uint8), torch.randint(0, 2, (2,))
    loss = F.cross_entropy(net(img), y)
    opt.zero_grad(); loss.backward(); opt.step()
