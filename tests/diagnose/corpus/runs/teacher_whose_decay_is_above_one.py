# kind: 2
# expect: growth mse_loss
# says: 0\.weight of a model \(Sequential\) grew from \S+ when step 2 ended to \S+ in step \d+
# cure: ^stop the growth of 0\.weight of a model .* It grew 1\.\d+-fold a step by this line: .*: average\.mul_\(1\.9\)
import copy

import torch
from torch import nn

torch.manual_seed(0)
student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
teacher = copy.deepcopy(student)
optimizer = torch.optim.Adam(student.parameters(), 1e-3)
for _ in range(120):
    x = torch.randn(32, 6)
    with torch.no_grad():
        target = teacher(x)
    loss = nn.functional.cross_entropy(student(x), (x[:, 0] > 0).long())
    loss = loss + nn.functional.mse_loss(student(x + 0.1), target)  # bad
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for average, weight in zip(teacher.parameters(), student.parameters(), strict=True):
            average.mul_(1.9).add_(weight, alpha=-0.9)
