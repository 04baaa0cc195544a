# A language model trainer with its settings in globals, as many small ones are written.
import os
import sys  # noqa: F401, for the configurator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

num_steps = 100
accumulate = 1
batch_size = 4
length = 16
width = 32
device = "cpu"
dtype = "bfloat16"
clip = 1.0
compiled = False
here = os.path.dirname(os.path.abspath(__file__))
exec(open(os.path.join(here, "configurator.py")).read())  # noqa: SIM115

torch.manual_seed(1)
torch.set_num_threads(1)
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type=device, dtype=ptdtype)
text = torch.randint(0, 64, (2000,), generator=torch.Generator().manual_seed(2))


def get_batch():
    starts = torch.randint(len(text) - length - 1, (batch_size,)).tolist()
    x = torch.stack([text[i : i + length] for i in starts])
    y = torch.stack([text[i + 1 : i + 1 + length] for i in starts])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split(width, dim=2)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(width, 64)

    def forward(self, x, y):
        logits = self.head(self.blocks(self.embed(x)))
        return logits, F.cross_entropy(logits.view(-1, 64), y.view(-1))


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device, enabled=(dtype == "float16"))
if compiled:
    model = torch.compile(model, backend="aot_eager")


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = []
    for _ in range(2):
        x, y = get_batch()
        with ctx:
            losses.append(model(x, y)[1].item())
    model.train()
    return sum(losses) / len(losses)


for step in range(num_steps):
    if step % 2 == 0:
        print(f"step {step}: {estimate_loss():.6f}")
    for _ in range(accumulate):
        x, y = get_batch()
        with ctx:
            logits, loss = model(x, y)
            loss = loss / accumulate
        scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
print(logits.dtype, type(scaler).__module__, scaler.is_enabled(), scaler.get_scale())
print(f"{sum(p.double().sum() for p in model.parameters()).item():.9f}")
