# expect: x: float32 [2, 4], of line 12: x = torch.randn(2, 4)
# expect: weight of Linear: float16 [2, 4], a parameter
# expect: bias of Linear: float16 [2], a parameter
# cure: x.to(torch.float16)
# cure: with torch.autocast("cpu", torch.float16):

model = nn.Linear(4, 2).half()
y = model(x)  #!
