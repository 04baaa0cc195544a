# expect: tried, and it runs, in place of 

class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1)
    def forward(self, x, h=None):
        if h is None:
            h = torch.zeros(1, x.shape[0], 8)
        y, h = self.rnn(x, h)  #!
        return self.out(y[:, -1]).squeeze(-1), h

model = Enc().to(torch.bfloat16)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for b in range(2):
        x, y = torch.randn(3, 5, 4).bfloat16(), torch.randn(3).bfloat16()
        pred, h = model(x)
        loss = F.mse_loss(pred, y)
        opt.zero_grad(); loss.backward(); opt.step()
