# thread: mikel-brostrom/boxmot 1820
# expect: x.type(torch.float32): float32 [2, 4]
# expect: 1.weight of Sequential: float16 [4]

class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        orig_type = x.dtype
        ret = super().forward(x.type(torch.float32))  #!
        return ret.type(orig_type)

vit = nn.Sequential(nn.Linear(4, 4), LayerNorm(4)).half()
vit(half)
