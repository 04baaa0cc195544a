# expect: alibi: float32 [2, 1, 3], of line #2
# expect: q: bfloat16 [2, 3, 4], of line #1

def build_alibi(mask, heads):
    slopes = torch.tensor([0.5**n for n in range(heads)])
    return (slopes[:, None, None] * mask.cumsum(-1)[None, None, :]).float()

class Attention(nn.Module):
    def forward(self, q, k, alibi):
        return alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.5)  #!

q = torch.randn(2, 3, 4).bfloat16()  #1
alibi = build_alibi(torch.ones(3), 2)  #2
Attention()(q, q, alibi)
