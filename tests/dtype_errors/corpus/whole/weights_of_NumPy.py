# expect: tried, and it runs, in place of 

import numpy as np
y_all = np.array([0, 0, 1, 2, 2, 2, 1, 0])
weights = torch.from_numpy(1.0 / np.bincount(y_all))
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    x, y = torch.randn(8, 4), torch.from_numpy(y_all)
    loss = F.cross_entropy(model(x), y, weight=weights)  #!
    opt.zero_grad(); loss.backward(); opt.step()
