# expect: x[0]: float32 [4]
# expect: half[0]: float16 [4]
# cure: half[0].to(torch.float32)

torch.dot(x[0], half[0])  #!
