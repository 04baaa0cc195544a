import torch
from transformers import AutoModel, Trainer, TrainingArguments
def first():
    model = AutoModel.from_pretrained(name, torch_dtype=torch.bfloat16)  # expect: bf16-parameters
    trainer = Trainer(model=model, args=TrainingArguments("out"), train_dataset=data)
    trainer.train()
def second(model):
    model = model.to(torch.bfloat16)  # expect: bf16-parameters
    trainer = Trainer(model, TrainingArguments("out"))
    trainer.train()
def only_evaluates(model):
    model = model.to(torch.bfloat16)
    trainer = Trainer(model, TrainingArguments("out"))
    trainer.evaluate(data)
