# expect: tried, and it runs, in place of 

class Fuse(nn.Module):
    def __init__(self):
        super().__init__()
        self.img, self.txt, self.cls = nn.Linear(6, 4).half(), nn.Linear(5, 4), nn.Linear(4, 3).half()
    def forward(self, a, b):
        z = torch.stack([self.img(a), self.txt(b)]).mean(0)
        z = torch.where(z > 0, z, 0.1 * z)
        return self.cls(z)  #!

model = Fuse()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    a, b, y = torch.randn(4, 6).half(), torch.randn(4, 5), torch.randint(0, 3, (4,))
    loss = F.cross_entropy(model(a, b).float(), y)
    opt.zero_grad(); loss.backward(); opt.step()
