# expect: x.flatten(1).view(-1, 4): float16 [2, 4]
# expect: fc.weight of
# expect: float32 [2, 4]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv1d(2, 2, 1), nn.Linear(4, 2)

    def forward(self, x):
        x = self.conv(x)
        return self.fc(x.flatten(1).view(-1, 4))  #!

net = nn.DataParallel(Net())
net.module.conv.half()
net(half[None])
