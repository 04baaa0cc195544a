# expect: cov: float16 [4, 4], of line #2: cov = h.t()

h = nn.Linear(4, 4).half()(half)  #1
cov = h.t() @ h + torch.eye(4).half()  #2
whitening = torch.linalg.inv(cov)  #!
