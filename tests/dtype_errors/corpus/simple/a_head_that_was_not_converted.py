# expect: h: float16 [2, 4], of line #1: h = self.body(x).relu()
# expect: head.weight of Net: float32 [2, 4], a parameter
# cure: h.to(torch.float32)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4).half(), nn.Linear(4, 2)

    def forward(self, x):
        h = self.body(x).relu()  #1
        return self.head(h)  #!

Net()(half)
