# expect: float32
# expect: float16
# incurable
# missed: anything

w = nn.Parameter(torch.randn(4, 4))
h = x @ w
h.register_hook(lambda grad: grad.half())
h.sum().backward()  #!
