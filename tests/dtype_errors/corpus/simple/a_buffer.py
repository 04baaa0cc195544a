# expect: x: float16
# expect: self.turn: float32 [4, 4], a buffer, 0.turn of Sequential
# cure: x.to(torch.float32)

class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("turn", torch.eye(4))

    def forward(self, x):
        return torch.matmul(x, self.turn)  #!

nn.Sequential(Rotated())(half)
