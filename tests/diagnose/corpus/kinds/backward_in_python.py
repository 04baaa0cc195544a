# expect: maths of div reciprocal
# dtypes: none
# inputs: 4

# --- setup
class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        y, = ctx.saved_tensors
        return gradient / (2 * y)  # bad


model = nn.Linear(4, 4)

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
loss = Root.apply(keep * model(x).square()).mean()
