# expect: bank.seen: int64 [4]
# incurable: the count has to be float where it is made

bank = nn.Module()
bank.register_buffer("seen", torch.arange(4))
share = torch.full((4,), 0.5)
bank.seen *= share  #!
