# expect: float16 [2, 4]
# expect: target: float64 [2, 4], of line #1
# cure: target.to(torch.float16)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sigmoid()

model = Net().half()
target = torch.rand(2, 4).double()  #1
F.binary_cross_entropy(model(half), target)  #!
