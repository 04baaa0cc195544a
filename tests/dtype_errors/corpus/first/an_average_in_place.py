# expect: average: float32 [2, 4]
# expect: p: float16 [2, 4]
# expect: a parameter, weight of Linear

model, ema = nn.Linear(4, 2).half(), nn.Linear(4, 2)

@torch.no_grad()
def update(decay=0.9):
    for p, average in zip(model.parameters(), ema.parameters()):
        average.lerp_(p, 1 - decay)  #!

update()
