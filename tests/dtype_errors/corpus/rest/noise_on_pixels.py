# expect: image: uint8 [3, 4, 4], of line #1
# cure: image = image.to(torch.float32)

model = nn.Conv2d(3, 2, 1)
for _ in range(2):
    image = torch.randint(0, 256, (3, 4, 4), dtype=torch.uint8)  #1
    image += 0.1 * torch.randn(3, 4, 4)  #!
    model(image[None])
