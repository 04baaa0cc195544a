# A language model in bfloat16 with the Trainer of transformers, which goes on from a checkpoint.
# With "hand", halfstep is called as its guide says.
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
config = GPT2Config(
    n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
)
numbers = torch.arange(8) % 7
data = [{"input_ids": numbers + each, "labels": numbers + each} for each in range(16)]


class HandTrainer(Trainer):
    def create_optimizer(self, *args, **kwargs):
        import halfstep

        optimizer = super().create_optimizer(*args, **kwargs)
        halfstep.guard(halfstep.master_weights(optimizer))
        return optimizer


for steps in 3, 6:
    model = GPT2LMHeadModel(config).to(torch.bfloat16)
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        max_steps=steps,
        learning_rate=1e-5,
        per_device_train_batch_size=4,
        report_to=[],
        save_steps=3,
        disable_tqdm=True,
    )
    trainer = (HandTrainer if "hand" in sys.argv else Trainer)(model, arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=steps > 3)
print(sum(param.double().sum().item() for param in model.parameters()))
