# expect: a: float16 [2, 4], of line #1
# expect: b.t(): float32 [4, 2]
# expect: off

@torch.autocast("cpu", enabled=False)
def distance(a, b):
    return a @ b.t()  #!

with halfstep.autocast("cpu", torch.float16):
    h = nn.Linear(4, 4)(x)  #1
    distance(h, x)
