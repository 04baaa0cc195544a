# kind: 7
# form: error
# expect: error
# cure: lora_B
import torch
from torch import nn

torch.manual_seed(0)


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).half()
        self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        out = self.base(x)
        low = self.lora_A(x)
        return out + self.lora_B(low)


model = LoRA()
opt = torch.optim.SGD([model.lora_A.weight, model.lora_B.weight], lr=0.1)
for i in range(3):
    x = torch.randn(4, 8).half()
    loss = model(x).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
