# expect: sample: float32 [2, 2], of line #1: emb = sinusoid(steps)
# expect: linear_1.weight of Unet: f

def sinusoid(steps):
    return torch.cat([steps[:, None].float().sin(), steps[:, None].float().cos()], dim=-1)

class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_1, self.act = nn.Linear(2, 4), nn.SiLU()

    def embed(self, sample, condition=None):
        if condition is not None:
            sample = sample + condition
        sample = self.linear_1(sample)  #!
        return self.act(sample)

    def forward(self, x, steps):
        emb = sinusoid(steps)  #1
        return x + self.embed(emb)

Unet().half()(half, torch.arange(2))
