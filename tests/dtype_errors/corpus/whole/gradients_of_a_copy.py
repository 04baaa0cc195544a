# expect: tried, and it runs, in place of 

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).half()
master = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
opt = torch.optim.SGD(master, lr=0.1)
for i in range(3):
    x, y = torch.randn(8, 4).half(), torch.randint(0, 2, (8,))
    loss = F.cross_entropy(model(x).float(), y)
    model.zero_grad()
    loss.backward()
    for m, p in zip(master, model.parameters()):
        m.grad = p.grad  #!
    opt.step()
    with torch.no_grad():
        for m, p in zip(master, model.parameters()):
            p.copy_(m)
