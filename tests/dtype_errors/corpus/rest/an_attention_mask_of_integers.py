# expect: hidden[:, None]: int64 [2, 1, 3], of line #1
# cure: hidden[:, None].bool()

tokens, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
layer = nn.Linear(4, 4)
scores = layer(tokens) @ tokens.mT
hidden = 1 - mask  #1
scores = scores.masked_fill(hidden[:, None], -1e9)  #!
(scores.softmax(-1) @ tokens * mask[:, :, None]).sum().backward()
