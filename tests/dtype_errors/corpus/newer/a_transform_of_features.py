# thread: pytorch/pytorch 117844
# expect: h: bfloat16 [1, 2, 4], of line #1: h = self.conv(x)

class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 2, 1), nn.LayerNorm(4)

    def forward(self, x):
        h = self.conv(x)  #1
        spectrum = torch.fft.rfft(h, dim=-1, norm="ortho")  #!
        return torch.fft.irfft(spectrum, dim=-1)

Spectral().bfloat16()(x[None].bfloat16())
