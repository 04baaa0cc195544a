import torch

from prelude import X, model_and_sgd

model, _ = model_and_sgd()

@torch.compile(backend="eager")
def f(x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)

print(f(X).dtype, f(X).sum().item())
