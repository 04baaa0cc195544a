# thread: zjukg/KoPA 11
# expect: embeds: float32 [2, 4], of line #1: embeds = torch.cat
# expect: lm.weight of Model: float16

class Prefix(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.adapter = nn.Embedding(3, 4), nn.Linear(4, 4)

    def forward(self, ids):
        return self.adapter(self.embeddings(ids))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(8, 4).half()
        self.lm = nn.Linear(4, 8).half()
        self.prefix = Prefix()

    def forward(self, ids, kg):
        prefix = self.prefix(kg)
        embeds = torch.cat((prefix, self.tokens(ids)), dim=0)  #1
        return self.lm(embeds)  #!

Model()(torch.tensor([1]), torch.tensor([0]))
