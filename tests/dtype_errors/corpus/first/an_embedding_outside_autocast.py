# expect: h: float32 [2, 4], of line #1: h = self.embed(ids)
# expect: layers.0.weight of Decoder: floa

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4).half()])

    def forward(self, ids):
        h = self.embed(ids)  #1
        for layer in self.layers:
            h = layer(h)  #!
        return h

Decoder()(torch.tensor([1, 2]))
