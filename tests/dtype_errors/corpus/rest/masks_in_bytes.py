# expect: masks[b]: uint8 [2, 16, 16], of line
# cure: masks[b].long()

torch.manual_seed(0)
class Seg(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    def forward(self, x): return self.net(x)
def dice(logits, mask):
    p = logits.softmax(1)
    onehot = F.one_hot(mask, 4).permute(0, 3, 1, 2)
    return 1 - (2 * (p * onehot).sum() / (p + onehot).sum())
model = Seg(); opt = torch.optim.Adam(model.parameters(), 1e-3)
images = torch.randn(8, 3, 16, 16)
masks = torch.randint(0, 4, (8, 16, 16)).to(torch.uint8)
for i in range(4):
    b = slice(2 * i, 2 * i + 2)
    logits = model(images[b])
    loss = F.cross_entropy(logits, masks[b]) + dice(logits, masks[b])  #!
    opt.zero_grad(); loss.backward(); opt.step()
