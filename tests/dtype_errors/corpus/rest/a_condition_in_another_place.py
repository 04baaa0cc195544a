# expect: mask: float32 [3]
# cure: torch.where(kept, mask, other)

def blend(mask, kept, other):
    return torch.where(mask, kept, other)  #!
values = torch.tensor([0.5, 2.0, -3.0])
for _ in range(2):
    values = blend(values, values > 0, torch.zeros(3))
