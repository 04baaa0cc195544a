# expect: bank.seen: int64 [4]
# expect: hits: float32 [4], of line #1
# cure: bank.seen += hits.long()

bank = nn.Module()
bank.register_buffer("seen", torch.zeros(4, dtype=torch.long))
hits = F.one_hot(torch.tensor([1, 3]), 4).float().sum(0)  #1
bank.seen += hits  #!
