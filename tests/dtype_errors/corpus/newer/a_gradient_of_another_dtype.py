# thread: Lightning-AI/pytorch-lightning 16303
# expect: master: float32 [2, 4]
# expect: p.grad.detach(): float16 [2, 4]

model = nn.Linear(4, 2).half()
masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
model(half).sum().backward()
for p, master in zip(model.parameters(), masters):
    master.grad = p.grad.detach()  #!
