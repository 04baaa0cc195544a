# thread: meta-pytorch/torchtune 1349
# expect: k_out: bfloat16 [1, 1, 8, 4], a buffer, cache.k of A
# expect: k_val: float32 [1, 1, 2, 4], of line #1

class Cache(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 1, 8, 4, dtype=dtype), persistent=False)

    def update(self, pos, k_val):
        k_out = self.k
        k_out[:, :, pos] = k_val  #!
        return k_out

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wk, self.cache = nn.Linear(4, 4), Cache(torch.bfloat16)

    def forward(self, x, pos):
        k = self.wk(x)[None, None]  #1
        return self.cache.update(pos, k)

Attention()(x, torch.tensor([0, 1]))
