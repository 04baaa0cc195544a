# expect: maths of log
# dtypes: none bfloat16
# inputs: 4
# outputs: 4

# --- setup
class Log(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.log()  # bad

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient / x.clamp_min(1e-3)


model = nn.Linear(4, 4)

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x).float() * keep
loss = Log.apply(h.abs()).mean()
