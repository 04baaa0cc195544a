# A model in bfloat16 with accelerate. With "hand", halfstep is called as its guide says.
import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
if "hand" in sys.argv:
    import halfstep

    halfstep.guard(halfstep.master_weights(optimizer), max_norm=1.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
for _ in range(8):
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).float().square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
print(sum(param.double().sum().item() for param in model.parameters()))
