# expect: out: float16 [4, 4], of line #1
# expect: x: float32 [2, 4], of line 12
# incurable

out = torch.zeros(4, 4).half()  #1
rows = torch.tensor([0, 1])
out[rows] = x  #!
