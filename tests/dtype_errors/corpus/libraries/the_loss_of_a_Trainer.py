# thread: zai-org/GLM-4 693
# expect: hidden[:, -1]: float16 [2, 8]
# expect: weight of Linear: float32 [1, 8]

import tempfile
from transformers import GPT2Config, GPT2Model, Trainer, TrainingArguments

class Reward(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.head = nn.Linear(8, 1)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        hidden = model(input_ids=inputs["input_ids"]).last_hidden_state  #1
        return self.head(hidden[:, -1]).mean()  #!

model = GPT2Model(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)).half()
data = [{"input_ids": torch.tensor([1, 2])}] * 2
arguments = TrainingArguments(
    tempfile.mkdtemp(), report_to="none", use_cpu=True, max_steps=1, disable_tqdm=True,
    remove_unused_columns=False,
)
Reward(model=model, args=arguments, train_dataset=data).train()
