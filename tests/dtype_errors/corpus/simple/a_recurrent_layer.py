# expect: half: float16 [2, 4], of line 13
# incurable

model = nn.GRU(4, 3)
model(half)  #!
