# expect: a: float32 [2, 4], of line 12: x =
# expect: b: bfloat16 [4, 3], of line #1: table =
# cure: b.to(torch.float32)

def loss(a, b):
    return a @ b  #!

def caller():
    table = torch.randn(4, 3, dtype=torch.bfloat16)  #1
    return loss(x, table)

caller()
