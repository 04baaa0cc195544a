# expect: maths of _softmax
# $heads: 1
# $heads: 2
# $heads: 3
# dtypes: none bfloat16
# inputs: 6

# --- setup
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, $heads, batch_first=True)

    def forward(self, x, padding):
        out, _ = self.attention(x, x, x, key_padding_mask=padding)  # bad
        return x + out

model = Block()

# --- batch: x, padding
x = torch.randn(2, 5, 6)
padding = torch.zeros(2, 5, dtype=torch.bool)

# --- bad batch
padding[0] = True

# --- loss
loss = model(x, padding).float().square().mean()
