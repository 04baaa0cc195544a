# The recipe of the first years of mixed precision, written for CUDA; it falls back to the CPU.
import torch
from torch.cuda.amp import *  # noqa: F403

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = GradScaler()  # noqa: F405


@autocast()  # noqa: F405
def loss_of(x, y):
    return torch.nn.functional.mse_loss(model(x), y)


for _ in range(6):
    x = torch.randn(16, 8, device=device)
    y = x.sum(1, keepdim=True)
    optimizer.zero_grad()
    loss = loss_of(x, y)
    with autocast(enabled=False):  # noqa: F405
        loss = loss + 0 * model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"{loss.item():.6f}")
torch.save({"scaler": scaler.state_dict()}, "checkpoint.pt")
scaler.load_state_dict({}) if scaler.is_enabled() else None
assert isinstance(scaler, GradScaler)  # noqa: F405
assert isinstance(scaler, torch.amp.GradScaler)
