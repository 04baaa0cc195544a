# expect: tried, and it runs, in place of 

class Quant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codebook):
        d = torch.cdist(x.float(), codebook.float())
        i = d.argmin(1)
        ctx.save_for_backward(i, codebook)
        return codebook[i]
    @staticmethod
    def backward(ctx, g):
        i, codebook = ctx.saved_tensors
        gc = torch.zeros(codebook.shape).index_add(0, i, g)  #!
        return g, gc
class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.d = nn.Linear(5, 4), nn.Linear(4, 5)
        self.code = nn.Parameter(torch.randn(7, 4))
    def forward(self, x):
        return self.d(Quant.apply(self.e(x), self.code))
vq = VQ().bfloat16()
opt = torch.optim.SGD(vq.parameters(), lr=0.1)
for i in range(3):
    x = torch.randn(6, 5).bfloat16()
    loss = F.mse_loss(vq(x).float(), x.float())
    opt.zero_grad(); loss.backward(); opt.step()
