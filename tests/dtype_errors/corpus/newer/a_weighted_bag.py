# expect: weights: float32 [2, 3], of line #1
# expect: weight of EmbeddingBag: float16 [8, 4]

bag = nn.EmbeddingBag(8, 4, mode="sum").half()
weights = torch.rand(2, 3)  #1
bag(torch.zeros(2, 3, dtype=torch.long), per_sample_weights=weights)  #!
