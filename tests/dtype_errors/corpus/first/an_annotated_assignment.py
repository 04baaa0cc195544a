# expect: x: float32 [2, 4], of line 12
# expect: weight: float16 [4, 4], of line #1: weight: torch.Te

weight: torch.Tensor = torch.randn(4, 4, dtype=torch.float16)  #1
torch.addmm(torch.zeros(4), x, weight)  #!
