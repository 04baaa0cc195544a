import torch
from accelerate import Accelerator
from transformers import Seq2SeqTrainingArguments, Trainer, TrainingArguments
arguments = TrainingArguments("out", fp16=True, use_cpu=True)  # expect: device-differs
others = Seq2SeqTrainingArguments("out", use_cpu=True, fp16=True)  # expect: device-differs
Trainer(model, arguments).train()
accelerator = Accelerator(mixed_precision="fp16", cpu=True)  # expect: device-differs
accelerator.backward(model(x))
