# expect: phase: complex64 [3, 4], of line #1
# cure: torch.einsum("bn,tn->bt", x.to(torch.complex64), phase)

class Beams(nn.Module):
    def __init__(self):
        super().__init__()
        self.angles = nn.Parameter(torch.linspace(-1, 1, 3))
    def forward(self, x):
        phase = torch.exp(1j * torch.arange(4)[None] * self.angles[:, None])  #1
        return torch.einsum("bn,tn->bt", x, phase).abs()  #!
model = Beams()
for _ in range(2):
    model(torch.randn(5, 4)).sum().backward()
