# expect: h: float32 [1, 2, 4], of line #1: h = h + self.pe
# expect: in_proj_weight of Tagger: bfloat16

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.register_buffer("pe", torch.zeros(1, 2, 4))

    def forward(self, h):
        h = h + self.pe  #1
        return self.encoder(h)  #!

tagger = Tagger().bfloat16()
tagger.pe = tagger.pe.float()
tagger(x.bfloat16()[None])
