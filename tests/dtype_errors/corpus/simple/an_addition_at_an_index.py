# expect: sums: float32 [2, 4]
# expect: half: float16 [2, 4]
# incurable

sums = torch.zeros(2, 4)
index = torch.tensor([0, 0])
sums.index_add_(0, index, half)  #!
