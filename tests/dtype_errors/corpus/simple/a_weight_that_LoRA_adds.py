# expect: x: float16 [2, 4]
# expect: self.a: float32 [4, 1], a parameter, a of LoRA
# cure: x.to(torch.float32) @ self.a

class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a, self.b = nn.Parameter(torch.randn(4, 1)), nn.Parameter(torch.zeros(1, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b  #!

LoRA(nn.Linear(4, 2).half())(half)
