# expect: x: float16 [2, 4], of line 13
# expect: 0.lora_a.default.weight of Sequential: float32 [1, 4]

class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_a = nn.ModuleDict({"default": nn.Linear(4, 1, bias=False)})
        self.lora_b = nn.ModuleDict({"default": nn.Linear(1, 2, bias=False)})

    def forward(self, x):
        result = self.base(x)
        for name in self.lora_a:
            result = result + self.lora_b[name](self.lora_a[name](x))  #!
        return result

nn.Sequential(Lora(nn.Linear(4, 2).half()))(half)
