# thread: pytorch/pytorch 173459
# expect: attn: float32 [1, 1, 2, 2], of line #2: attn = F.d
# expect: v: float16 [1, 1, 2, 4]

class Attention(nn.Module):
    def forward(self, q, k, v):
        attn = q @ k.transpose(-2, -1) / 2
        attn = F.softmax(attn, dim=-1, dtype=torch.float32)  #1
        attn = F.dropout(attn, p=0.1, training=self.training)  #2
        return torch.matmul(attn, v)  #!

q = half[None, None]
Attention()(q, q, q)
