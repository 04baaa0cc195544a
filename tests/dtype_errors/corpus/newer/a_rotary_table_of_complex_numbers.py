# expect: freqs: bfloat16 [3, 2], of line #1: freqs = torch.outer

def precompute(dim, end):
    freqs = 1.0 / (100.0 ** (torch.arange(0, dim, 2).to(torch.get_default_dtype()) / dim))
    freqs = torch.outer(torch.arange(end).to(freqs.dtype), freqs)  #1
    return torch.polar(torch.ones_like(freqs), freqs)  #!

torch.set_default_dtype(torch.bfloat16)
try:
    precompute(4, 3)
finally:
    torch.set_default_dtype(torch.float32)
