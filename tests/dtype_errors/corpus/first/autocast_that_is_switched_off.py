# expect: h: bfloat16 [2, 4], of line #1
# expect: head.weight of Net: float32
# expect: enabled=False)
# expect: line #2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.body(x)  #1
        with torch.autocast(device_type="cpu", enabled=False):  #2
            return self.head(h)  #!

with torch.autocast("cpu", torch.bfloat16):
    Net()(x)
