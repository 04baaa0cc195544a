import torch

from prelude import X, model_and_sgd

def f(m, x):
    return m(x)

@torch.cuda.amp.autocast(enabled=False)
def g(m, x):
    return m(x)

model, _ = model_and_sgd()
print(f(model, X).dtype, g(model, X).dtype)
with torch.autocast(device_type="cpu", enabled=False):
    print(model(X).dtype)
with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
    print(model(X).sum().item())
with torch.cpu.amp.autocast():
    print(model(X).dtype, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
ctx = torch.amp.autocast("cpu", dtype=torch.bfloat16)
ctx.__enter__()
y = model(X)
ctx.__exit__(None, None, None)
print(y.dtype)
with ctx, ctx:
    print(model(X).dtype)
torch.set_autocast_enabled("cpu", True)
print(model(X).dtype)
torch.set_autocast_enabled("cpu", False)
print(
    isinstance(torch.amp.GradScaler("cpu"), torch.amp.GradScaler),
    isinstance(ctx, torch.autocast),
    issubclass(torch.cpu.amp.autocast, torch.autocast),
)
