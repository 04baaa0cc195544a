# expect: counts: int64 [3]
# cure: add(torch.zeros(3, dtype=torch.long).to(torch.float32), w)

def add(counts, w):
    counts += w  #!
    return counts
w = torch.rand(3)
total = add(torch.zeros(3, dtype=torch.long), w)
total = add(total, w) / total.sum()
