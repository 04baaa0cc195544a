# expect: x: float32 [2, 4], of line 12
# expect: float16 [2, 4]
# expect: of line #1
# missed: a cure

model = nn.Linear(4, 2)
params = {name: p.detach().half() for name, p in model.named_parameters()}  #1
out = torch.func.functional_call(model, params, (x,))  #!
