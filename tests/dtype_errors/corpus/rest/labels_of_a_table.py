# expect: labels[rows]: float64 [2], of line #1: labels = torch.from_numpy(table[:, 4])
# cure: labels[rows].long())

import numpy as np

table = np.random.default_rng(0).random((8, 5)).round()
features = torch.from_numpy(table[:, :4]).float()
labels = torch.from_numpy(table[:, 4])  #1
model, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def run_epoch():
    right = 0
    for rows in torch.arange(8).split(2):
        logits = model(features[rows])
        loss = criterion(logits, labels[rows])  #!
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += (logits.argmax(1) == labels[rows]).sum().item()
    return right / 8


for _ in range(2):
    run_epoch()
