# expect: embeds: float16 [1, 3, 4]
# expect: features: float32 [2, 4], of line #2: features = nn.Lin

embeds = nn.Embedding(8, 4).half()(torch.tensor([[1, 2, 3]]))  #1
mask = torch.tensor([[False, True, True]])
features = nn.Linear(4, 4)(x)  #2
embeds = embeds.detach()
embeds[mask] = features  #!
