# expect: y: bfloat16 [2, 3], of line #1
# cure: torch.addmm(b.to(torch.bfloat16), x, w.t().to(torch.bfloat16), out=y)

class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        y = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype)  #1
        torch.addmm(b, x, w.t(), out=y)  #!
        return y
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x, g.sum(0)
layer = nn.Linear(4, 3)
for _ in range(2):
    x = torch.randn(2, 4).bfloat16().requires_grad_()
    Fused.apply(x, layer.weight, layer.bias).float().sum().backward()
