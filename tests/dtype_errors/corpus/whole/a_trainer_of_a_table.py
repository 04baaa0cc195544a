# expect: tried, and it runs, in place of 

import numpy as np
class Trainer:
    def __init__(self, model, data):
        self.model, self.data = model, data
        self.opt = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.criterion = nn.SmoothL1Loss()
    def step(self, batch):
        x, y = batch
        pred = self.model(x)  #!
        loss = self.criterion(pred.squeeze(-1), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()
    def fit(self):
        for epoch in range(2):
            total = 0.0
            for batch in self.data:
                total += self.step(batch)
            print(epoch, total)
rng = np.random.default_rng(1)
ds = torch.utils.data.TensorDataset(torch.from_numpy(rng.normal(size=(64, 4))), torch.from_numpy(rng.normal(size=64)))
Trainer(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), torch.utils.data.DataLoader(ds, batch_size=16)).fit()
