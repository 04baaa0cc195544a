# expect: tried, and it runs, in place of 

class LoRA(nn.Module):
    def __init__(self, base, r=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, r, bias=False)
        self.lora_B = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
    def forward(self, x):
        return self.base(x) + 2.0 * self.lora_B(self.lora_A(x))  #!
class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16).to(torch.bfloat16), nn.Linear(16, 4).to(torch.bfloat16)
    def forward(self, x):
        return self.fc2(F.silu(self.fc1(x)))
model = MLP()
model.fc1, model.fc2 = LoRA(model.fc1), LoRA(model.fc2)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(3):
    x, y = torch.randn(4, 8, dtype=torch.bfloat16), torch.randint(0, 4, (4,))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
