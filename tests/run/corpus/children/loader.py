# Usage: loader.py METHOD NUM: workers of a data loader.
import sys

import torch

if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    loader = torch.utils.data.DataLoader(
        data, batch_size=2, num_workers=int(sys.argv[2]), multiprocessing_context=sys.argv[1]
    )
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
