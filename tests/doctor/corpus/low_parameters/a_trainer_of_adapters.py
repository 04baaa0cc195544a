import torch
from peft import get_peft_model
from transformers import AutoModel, Trainer, TrainingArguments
model = AutoModel.from_pretrained(name, torch_dtype=torch.bfloat16)
model = get_peft_model(model, config)
trainer = Trainer(model, TrainingArguments("out"))
trainer.train()
