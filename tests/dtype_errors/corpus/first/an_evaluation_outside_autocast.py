# expect: batch: float32 [2, 4], of line 12: x = torch
# expect: 0.weight of Sequential: bfloat16

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).bfloat16()

@torch.no_grad()
def evaluate(model, batches):
    return [model(batch).argmax(-1) for batch, _ in batches]  #!

evaluate(model, [(x, 1)])  #1
