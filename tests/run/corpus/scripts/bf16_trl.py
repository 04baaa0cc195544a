# A language model in bfloat16 with a trainer of TRL: "sft" or "grpo". With "hand", halfstep is
# called as its guide says; with "float32", the model is stored in float32.
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

NUMBERS = [str(number) for number in range(61)]
vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", *NUMBERS])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
)
set_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
dtype = torch.float32 if "float32" in sys.argv else torch.bfloat16
model = LlamaForCausalLM(config).to(dtype)
texts = [" ".join(NUMBERS[(7 * row + place) % 61] for place in range(8)) for row in range(64)]
options = {
    "output_dir": "out",
    "use_cpu": True,
    "max_steps": 8,
    "learning_rate": 2e-5,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


def reward(completions, **_):
    return [float(sum(word in NUMBERS[::2] for word in text.split())) for text in completions]


if "sft" in sys.argv:
    cls, data, more = SFTTrainer, [{"text": text} for text in texts], {}
    arguments = SFTConfig(**options)
else:
    cls, data, more = GRPOTrainer, [{"prompt": t[:8]} for t in texts], {"reward_funcs": reward}
    arguments = GRPOConfig(**options, num_generations=4, max_completion_length=8)


class HandTrainer(cls):
    def create_optimizer(self, *args, **kwargs):
        import halfstep

        optimizer = super().create_optimizer(*args, **kwargs)
        halfstep.guard(halfstep.master_weights(optimizer), max_norm=1.0)
        return optimizer


trainer = (HandTrainer if "hand" in sys.argv else cls)(
    model, args=arguments, train_dataset=Dataset.from_list(data), processing_class=tokenizer, **more
)
trainer.train()
print([log["loss"] for log in trainer.state.log_history if "loss" in log])
print(sum(param.double().sum().item() for param in model.parameters()))
