# expect: tried, and it runs, in place of 

def batches():
    while True:
        yield torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters())
it, step = batches(), 0
while step < 3:
    x, y = next(it)
    loss = nn.functional.huber_loss(net(x), y)  #!
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
