# accelerate's launcher for notebooks forks two ranks.
import torch


def cell():
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()


if __name__ == "__main__":
    from accelerate import notebook_launcher
    notebook_launcher(cell, num_processes=2)
