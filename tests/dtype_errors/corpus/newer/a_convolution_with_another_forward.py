# thread: lshqqytiger/stable-diffusion-webui-amdgpu 564
# expect: input: float32 [1, 3, 2, 2], of line #1: noise
# expect: 0.weight of Sequential: float16

originals = nn.Conv2d.forward

def network_forward(self, input):
    return originals(self, input)  #!

nn.Conv2d.forward = network_forward
unet = nn.Sequential(nn.Conv2d(3, 1, 1), nn.SiLU()).half()
noise = torch.randn(1, 3, 2, 2)  #1
try:
    unet(noise)
finally:
    nn.Conv2d.forward = originals
