# expect: x1.view(x1.size(0), 1, -1): float16 [2, 1, 4]
# expect: of line #1: x1 =
# expect: l1.weight_ih_l0

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.l0, self.l1 = nn.Linear(4, 4), nn.LSTM(4, 3, bidirectional=True)

    def forward(self, x):
        x1 = self.l0.half()(x)  #1
        return torch.relu(self.l1(x1.view(x1.size(0), 1, -1))[0])  #!

Tagger()(half)
