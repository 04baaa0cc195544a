# expect: image: float16 [1, 3, 8, 8], of line #1
# expect: weight of Conv2d: float32
# cure: image.to(torch.float32)

image = torch.ones(1, 3, 8, 8).half()  #1
nn.Conv2d(3, 1, 3)(image)  #!
