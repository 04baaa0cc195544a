# expect: tried, and it runs, in place of
# cure: h = self.inp(x.to(torch.bfloat16)) + self.time(embed_time(t).to(torch.bfloat16))

import math

def embed_time(t, dim=8):
    freqs = torch.exp(-math.log(1000) * torch.arange(dim // 2) / (dim // 2))
    angle = t[:, None].float() * freqs
    return torch.cat([angle.cos(), angle.sin()], 1)

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.time, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, t):
        h = self.inp(x) + self.time(embed_time(t))  #!
        return self.out(h)

model = Denoiser().bfloat16()
for _ in range(2):
    model(x, torch.arange(2)).sum().backward()
