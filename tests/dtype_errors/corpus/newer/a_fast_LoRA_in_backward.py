# thread: unslothai/unsloth 212
# expect: dY: float16 [2, 4]
# expect: B.t(): float32 [4, 1]

class FastLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, A, B):
        ctx.save_for_backward(X, A, B)
        return X @ A.to(X.dtype) @ B.to(X.dtype)

    @staticmethod
    def backward(ctx, dY):
        X, A, B = ctx.saved_tensors
        h = X.view(-1, X.shape[-1])
        d_A = h.t() @ (dY @ B.t())  #!
        return None, d_A, None

A, B = nn.Parameter(torch.randn(4, 1)), torch.randn(1, 4)  #1
y = checkpoint(FastLora.apply, half, A, B, use_reentrant=False)
y.sum().backward()
