# thread: huggingface/transformers, models/yoso/modeling_yoso.py
# expect: expectation.mT: float32 [2, 2]
# expect: grad: bfloat16 [2, 4]
# expect: Cumulation.backward has no custom_bwd
# cure: @halfstep.custom_fwd(device_type="cpu")
# cure: @halfstep.custom_bwd(device_type="cpu")

class Cumulation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        expectation = (1 - torch.acos(query @ key.mT) / torch.pi) ** 9
        ctx.save_for_backward(query, key, expectation)
        return expectation @ value

    @staticmethod
    def backward(ctx, grad):
        query, key, expectation = ctx.saved_tensors
        return None, None, torch.matmul(expectation.mT, grad)  #!

model = nn.Linear(4, 4)
with halfstep.autocast("cpu", torch.bfloat16):
    query = 0.9 * F.normalize(model(x), dim=-1)
    y = Cumulation.apply(query, query, model(x))
y.float().sum().backward()
