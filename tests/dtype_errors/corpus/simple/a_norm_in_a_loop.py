# expect: 0.weight of ModuleList: bfloat16 [4], a parameter
# incurable

norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2)).bfloat16()
for norm in norms:
    x = norm(x)  #!
