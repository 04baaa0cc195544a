# expect: query: float32 [1, 2, 4], of line #1
# expect: in_proj_weight of MultiheadAttention: float16

mha = nn.MultiheadAttention(4, 2, batch_first=True).half()
query = torch.randn(1, 2, 4)  #1
out, _ = mha(query, query, query, key_padding_mask=torch.tensor([[False, True]]))  #!
