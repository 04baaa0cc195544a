import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments("out", fp16=True, use_cpu=not torch.cuda.is_available())
Trainer(model, TrainingArguments("out", bf16=True, use_cpu=True)).train()
accelerator = Accelerator(mixed_precision="bf16", cpu=True)
accelerator = Accelerator(mixed_precision="fp16")
accelerator.backward(model(x))
