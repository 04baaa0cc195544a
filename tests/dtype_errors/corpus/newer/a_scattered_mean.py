# thread: cvg/glue-factory 76
# expect: update: float32 [2, 4], of line #2
# expect: lines: bfloat16 [2, 4], of line #1

class Lines(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def forward(self, desc, junctions):
        lines = self.mlp(desc)  #1
        update = torch.zeros_like(desc)  #2
        index = junctions[:, None].repeat(1, 4)
        update = update.scatter_reduce_(  #!
            dim=0,
            index=index,
            src=lines,
            reduce="mean",
            include_self=False,
        )
        return desc + update

with torch.autocast("cpu", torch.bfloat16):
    Lines()(x, torch.tensor([0, 1]))
