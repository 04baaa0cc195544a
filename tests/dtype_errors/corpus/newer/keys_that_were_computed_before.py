# thread: nari-labs/dia 45
# expect: q: bfloat16 [1, 1, 2, 4], of line #1
# expect: attn_k: float32 [1, 1, 2, 4], of line #2
# missed: the line that computed them

class State:
    def __init__(self, enc, proj):
        self.k = proj(enc)[None, None].float()  #2
        self.v = self.k * 2

class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 4).bfloat16()

    def forward(self, Xq, cache=None):
        q = self.q_proj(Xq).view(1, 1, 2, 4)  #1
        if cache is not None:
            attn_k, attn_v = cache.k, cache.v
        return F.scaled_dot_product_attention(q, attn_k, attn_v, scale=1.0)  #!

attention = CrossAttention()
attention(x.bfloat16(), State(x.bfloat16(), attention.q_proj))
