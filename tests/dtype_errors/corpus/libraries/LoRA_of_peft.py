# thread: hiyouga/LlamaFactory 4432
# expect: x: float32 [2, 4], of line 12
# expect: base_model.model.up.base_layer.weight of
# expect: float16
# incurable

from peft import LoraConfig, get_peft_model

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())  #!

model = get_peft_model(Net().half(), LoraConfig(r=2, target_modules=["up"]))
y = model(x)
