import torch
from accelerate import Accelerator
from transformers import Seq2SeqTrainingArguments, Trainer, TrainingArguments
arguments = TrainingArguments("out", fp16=True, use_cpu=True)  # expect: fp16-on-cpu
others = Seq2SeqTrainingArguments("out", use_cpu=True, fp16=True)  # expect: fp16-on-cpu
Trainer(model, arguments).train()
accelerator = Accelerator(mixed_precision="fp16", cpu=True)  # expect: fp16-on-cpu
accelerator.backward(model(x))
