# expect: q: float16 [1, 1, 2, 4], of line #1
# expect: k: float32 [1, 1, 2, 4], of line #2: k = q.float()
# cure: q.to(torch.float32)

q = half.view(1, 1, 2, 4)  #1
k = q.float()  #2
F.scaled_dot_product_attention(q, k, k)  #!
