# expect: tried, and it runs, in place of 

class Attn(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.qkv, self.o = nn.Linear(w, 3 * w), nn.Linear(w, w)
    def forward(self, x, bias):
        q, k, v = self.qkv(x).chunk(3, -1)
        s = torch.baddbmm(bias, q, k.transpose(1, 2))  #!
        return self.o(s.softmax(-1) @ v)

layers = nn.ModuleList([Attn(8), Attn(8)]).half()
head = nn.Linear(8, 2).half()
opt = torch.optim.SGD([*layers.parameters(), *head.parameters()], lr=0.01)
for i in range(3):
    x, y = torch.randn(2, 6, 8).half(), torch.randint(0, 2, (2,))
    bias = torch.zeros(2, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e4)
    h = x
    for layer in layers:
        h = h + layer(h, bias)
    loss = F.cross_entropy(head(h.mean(1)).float(), y)
    opt.zero_grad(); loss.backward(); opt.step()
