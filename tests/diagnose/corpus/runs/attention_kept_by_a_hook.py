# kind: 4
# expect: range pow
# step: 1
# cure: pow:fp32
# says: tried for . steps of SGD on this batch
# never: traced live
import halfstep
import torch
from torch import nn

torch.manual_seed(0)
maps = {}
teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).requires_grad_(False)
student = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
for net in (teacher, student):
    net[1].register_forward_hook(lambda module, _, out: maps.update({module: out.pow(2)}))  # bad
teacher[0].weight.mul_(1000)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
scaler = halfstep.GradScaler(init_scale=2.0**12)
for _ in range(6):
    x = torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        teacher(x), student(x)
        loss = (maps[student[1]] - maps[teacher[1]]).pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
