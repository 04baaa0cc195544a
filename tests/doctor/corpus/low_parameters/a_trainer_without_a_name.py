import torch
from transformers import AutoModel, Trainer, TrainingArguments
def first():
    model = AutoModel.from_pretrained(name, torch_dtype=torch.bfloat16)  # expect: bf16-parameters
    Trainer(model=model, args=TrainingArguments("out"), train_dataset=data).train()
def only_evaluates(model):
    model = model.to(torch.bfloat16)
    Trainer(model, TrainingArguments("out")).evaluate(data)
