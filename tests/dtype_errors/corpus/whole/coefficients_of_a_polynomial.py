# expect: tried, and it runs, in place of 

coef = nn.Parameter(torch.zeros(4))
x = torch.linspace(-1, 1, 50, dtype=torch.float64)
y = torch.sin(3 * x)
opt = torch.optim.LBFGS([coef], max_iter=5)
def closure():
    opt.zero_grad()
    basis = torch.stack([x**k for k in range(4)], 1)
    loss = ((basis @ coef - y) ** 2).mean()  #!
    loss.backward()
    return loss
for i in range(3):
    opt.step(closure)
