# expect: tried, and it runs, in place of 

class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(6, 8).half(), nn.Linear(6, 8).half()
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.ptr = 0
    @torch.no_grad()
    def enqueue(self, k):
        idx = torch.arange(self.ptr, self.ptr + len(k)) % 32
        self.queue[:, idx] = k.t()
        self.ptr = (self.ptr + len(k)) % 32
    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            k = F.normalize(self.k(b), dim=1)
        pos = (q * k).sum(1, keepdim=True)
        neg = q @ self.queue.clone()  #!
        self.enqueue(k)
        return torch.cat([pos, neg], 1) / 0.2
m = MoCo()
opt = torch.optim.SGD(m.q.parameters(), lr=0.1)
for i in range(3):
    a = torch.randn(4, 6).half()
    logits = m(a, a + 0.1)
    loss = F.cross_entropy(logits.float(), torch.zeros(4, dtype=torch.long))
    opt.zero_grad(); loss.backward(); opt.step()
