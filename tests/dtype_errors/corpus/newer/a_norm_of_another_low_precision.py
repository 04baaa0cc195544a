# thread: Nerogar/OneTrainer 655
# expect: latents: float16
# expect: of line #1: latents = nn.Par
# expect: norm2.weight of Resampler: bfloat16 [4]

class Resampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, image, latents):
        image = self.norm1(image.float())
        latents = self.norm2(latents)  #!
        return image + latents

encoder = Resampler()
encoder.norm2.to(torch.bfloat16)
latents = nn.Parameter(half)  #1
encoder(x, latents)
