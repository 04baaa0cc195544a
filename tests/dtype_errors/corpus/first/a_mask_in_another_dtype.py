# expect: q: bfloat16 [1, 2, 4], of line #1
# expect: mask: float16 [2, 2], of line #2: mask =

mask = torch.zeros(2, 2).half()  #2
mask.masked_fill_(torch.ones(2, 2).triu(1).bool(), float("-inf"))
q = x[None].bfloat16()  #1
F.scaled_dot_product_attention(q, q, q, attn_mask=mask)  #!
