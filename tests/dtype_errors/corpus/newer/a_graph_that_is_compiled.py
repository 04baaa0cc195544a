# expect: x: float32 [2, 4], of line 12
# expect: 0.weight of Sequential: float16 [4, 4]

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).half()
compiled = torch.compile(model, backend="eager")
y = compiled(x)  #!
