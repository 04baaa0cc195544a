# expect: q: float16 [2, 4], of line #1
# expect: self.queue.clone().detach(): float32 [4, 6]

class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4).half()
        self.register_buffer("queue", torch.randn(4, 6))

    def forward(self, im_q):
        q = self.encoder(im_q)
        q = nn.functional.normalize(q, dim=1)  #1
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])  #!
        return l_neg

MoCo()(half)
