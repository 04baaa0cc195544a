# expect: x: float32 [2, 4]
# expect: model.weight: float16 [2, 4], a parameter, weight of Linear
# cure: x.to(torch.float16)

model = nn.Linear(4, 2).half()
F.linear(x, weight=model.weight)  #!
