# expect: tried, and it runs, in place of 

class Lang(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(12, 6), nn.LSTM(6, 8), nn.Linear(8, 12)
    def init_hidden(self, b):
        return torch.zeros(1, b, 8), torch.zeros(1, b, 8)
    def forward(self, x, hidden):
        out, hidden = self.r(self.e(x), hidden)  #!
        return self.o(out), hidden
model = Lang().double()
opt = torch.optim.SGD(model.parameters(), lr=0.5)
hidden = model.init_hidden(3)
for i in range(4):
    x = torch.randint(0, 12, (5, 3))
    hidden = tuple(h.detach() for h in hidden)
    out, hidden = model(x, hidden)
    loss = F.cross_entropy(out.view(-1, 12), x.view(-1))
    opt.zero_grad(); loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
