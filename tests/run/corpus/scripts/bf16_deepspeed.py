# One rank of DeepSpeed on a CPU, with NaN in one batch. With "hand", halfstep is called as its
# guide says, on the optimizer inside of DeepSpeed's.
import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}

import deepspeed
import torch
from torch import distributed


def train_stage(stage, is_cast=False, **config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    if is_cast:
        model.to(torch.bfloat16)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5),
        config={
            "train_batch_size": 8,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            **config,
        },
    )
    if "hand" in sys.argv:
        import halfstep

        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        if any(p.dtype is torch.bfloat16 for group in inner.param_groups for p in group["params"]):
            halfstep.master_weights(inner)
        halfstep.guard(inner, max_norm=1.0)
    dtype = torch.float32 if "torch_autocast" in config else torch.bfloat16
    for step in range(8):
        x = torch.full((8, 32), torch.nan) if step == 3 else torch.randn(8, 32)
        loss = engine(x.to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
    print("weights:", sum(param.double().sum().item() for param in model.parameters()))


distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
bf16 = {"enabled": True}
train_stage(0, torch_autocast={"enabled": True, "dtype": "bfloat16"})
train_stage(1, torch_autocast={"enabled": True, "dtype": "bfloat16"})
train_stage(0, bf16=bf16)
train_stage(1, bf16=bf16)
train_stage(1, bf16={**bf16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True})
train_stage(0, is_cast=True)
distributed.destroy_process_group()
