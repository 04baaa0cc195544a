# thread: mymusise/ChatGLM-Tuning 179
# expect: self.input_layernorm(hidden): float32 [2, 4]
# expect: 0.query_key_value.weight of Mod

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(4)
        self.query_key_value = nn.Linear(4, 12)

    def forward(self, hidden):
        return self.query_key_value(self.input_layernorm(hidden))  #!

def prepare(model):
    for name, p in model.named_parameters():
        if p.ndim == 1 and "layernorm" in name:
            p.data = p.data.float()
    return model

model = prepare(nn.ModuleList([Layer(), Layer()]).half())
hidden = half.requires_grad_()
for layer in model:
    hidden = checkpoint(layer, hidden.float(), use_reentrant=True)[..., :4]
