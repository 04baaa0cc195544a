# expect: tried, and it runs, in place of 

import numpy as np
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(40, 3)), rng.normal(size=(40, 1))
xt, yt, xv, yv = map(torch.tensor, (X[:30], Y[:30], X[30:], Y[30:]))
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
loss_fn = nn.HuberLoss()
opt = torch.optim.Adam(net.parameters())
for epoch in range(3):
    net.train()
    out = net(xt)  #!
    loss = loss_fn(out, yt)
    opt.zero_grad(); loss.backward(); opt.step()
    net.eval()
    with torch.no_grad():
        val = loss_fn(net(xv), yv)
    print(epoch, val.item())
