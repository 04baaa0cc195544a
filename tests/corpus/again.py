# An import, anew.
import importlib, sys
import halfstep, torch

def take_step():
    import halfstep
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), halfstep.GradScaler("cpu", 8.0)
    with halfstep.autocast("cpu", torch.float16):
        loss = model(torch.ones(1, 2)).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return lambda: scaler.outcome(optimizer).norm

norms = [take_step()]
assert importlib.reload(halfstep) is halfstep
norms.append(take_step())
for name in [name for name in sys.modules if name.partition(".")[0] == "halfstep"]:
    del sys.modules[name]
norms.append(take_step())
importlib.reload(sys.modules["halfstep._gradients.gradients"])
norms.append(take_step())
print(*(round(norm(), 4) for norm in norms))
