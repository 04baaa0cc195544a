# thread: huggingface/transformers 37068
# expect: query_embeds: float32 [2, 2, 4], of line #1: tokens
# expect: qformer.query.weight of Blip: fl

class QFormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, query_embeds):
        embedding = self.norm(query_embeds.to(self.norm.weight.dtype))
        return self.query(query_embeds) + embedding  #!

class Blip(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_tokens = nn.Parameter(torch.zeros(1, 2, 4))
        self.qformer = QFormer().half()

    def forward(self, image):
        tokens = self.query_tokens.expand(len(image), -1, -1)  #1
        return self.qformer(query_embeds=tokens)

Blip()(half)
