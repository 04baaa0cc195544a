# thread: meta-pytorch/torchtune 398
# expect: q: bfloat16 [1, 1, 1, 4], of line #3
# expect: k: float32 [1, 1, 2, 4], of line #5: cache =

class Cache:
    def __init__(self, dtype=torch.float32):
        self.k = torch.zeros(1, 1, 2, 4, dtype=dtype)  #1
        self.v = torch.zeros(1, 1, 2, 4, dtype=dtype)  #2

    def update(self, k, v):
        self.k[:, :, :1] = k
        self.v[:, :, :1] = v
        return self.k, self.v

cache = Cache()  #5
q = torch.randn(1, 1, 1, 4, dtype=torch.bfloat16)  #3
k, v = cache.update(q, q)  #4
out = F.scaled_dot_product_attention(q, k, v)  #!
