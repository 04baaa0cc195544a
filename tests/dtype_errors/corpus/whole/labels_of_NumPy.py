# expect: tried, and it runs, in place of 

import numpy as np
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(64, 5)), (rng.random(64) > 0.5).astype("int64")
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
opt = torch.optim.Adam(model.parameters())
crit = nn.BCELoss()
for epoch in range(2):
    for i in range(0, 64, 16):
        x, y = torch.tensor(X[i : i + 16]), torch.tensor(Y[i : i + 16])
        p = model(x).squeeze(1)  #!
        loss = crit(p, y)
        opt.zero_grad(); loss.backward(); opt.step()
