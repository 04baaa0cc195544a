# expect: image: bfloat16
# expect: of line #1
# expect: self.kernel: float32
# expect: a buffer, 1.kernel of Seq

class Blur(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kernel", torch.ones(1, 1, 3, 3) / 9)

    def forward(self, image):
        return F.conv2d(image, self.kernel, padding=1)  #!

image = torch.rand(1, 1, 4, 4).to(torch.bfloat16)  #1
nn.Sequential(nn.Identity(), Blur())(image)
