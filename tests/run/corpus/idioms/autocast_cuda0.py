import torch

from prelude import X, model_and_sgd

model, _ = model_and_sgd()
try:
    with torch.autocast("cuda:0", dtype=torch.float16):
        print(model(X).dtype)
except RuntimeError as e:
    print("RuntimeError", str(e)[:60])
try:
    with torch.autocast("cuda", dtype=torch.float16):
        print(model(X).dtype)
except RuntimeError as e:
    print("RuntimeError", str(e)[:60])
with torch.autocast("cpu", dtype=torch.float32):
    print(model(X).dtype)
with torch.autocast("cpu", dtype=torch.float64):
    print(model(X).dtype)
