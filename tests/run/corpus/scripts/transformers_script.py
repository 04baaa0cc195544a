# The Trainer of transformers in bf16.
import sys

import torch
from transformers import Trainer, TrainingArguments, set_seed

set_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def forward(self, x, labels):
        y = self.net(x)
        ours = sys.modules.get("halfstep._autocast.region")
        print("policy:", ours and ours.current_policy("cpu"), file=sys.stderr)
        print(y.dtype)
        return {"loss": (y.float() - labels).square().mean(), "logits": y}


data = [{"x": torch.randn(8), "labels": torch.ones(1)} for _ in range(16)]
arguments = TrainingArguments(
    output_dir="out",
    use_cpu=True,
    bf16=True,
    max_steps=4,
    per_device_train_batch_size=4,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
model = Model()
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
print(f"{model.net.weight.double().sum().item():.9f}")
