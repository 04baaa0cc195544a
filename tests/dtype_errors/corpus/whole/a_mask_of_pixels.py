# expect: tried, and it runs, in place of 

class Seg(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 1)
    def forward(self, x):
        return self.c2(F.relu(self.c1(x)))

def loss_fn(logit, mask):
    bce = F.binary_cross_entropy_with_logits(logit, mask)  #!
    p = logit.sigmoid()
    dice = 1 - 2 * (p * mask).sum() / (p.sum() + mask.sum() + 1)
    return bce + dice

model = Seg()
opt = torch.optim.Adam(model.parameters())
for step in range(3):
    img = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    mask = (img > 128).long()
    loss = loss_fn(model(img / 255), mask)
    opt.zero_grad(); loss.backward(); opt.step()
