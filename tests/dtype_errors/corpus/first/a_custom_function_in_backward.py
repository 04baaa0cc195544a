# expect: grad: float16 [2, 3]
# expect: w: float32 [3, 4]
# expect: Dense
# expect: Dense.backward has no custom_bwd
# expect: custom_bwd

class Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors  #1
        return grad @ w, grad.t() @ x  #!

w = nn.Parameter(torch.randn(3, 4))
with torch.autocast("cpu", torch.float16):
    y = Dense.apply(x, w)
y.float().sum().backward()
