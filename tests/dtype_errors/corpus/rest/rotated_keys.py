# expect: q: float32 [1, 2, 4]
# cure: self.out(y.flatten(1).view(2, 4).to(torch.float16))

def rotate(x):
    return x.float().roll(1, -1)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        q, v = rotate(x), x
        y = F.scaled_dot_product_attention(q, q, v)  #!
        return self.out(y.flatten(1).view(2, 4))

Attention().half()(half[None])
