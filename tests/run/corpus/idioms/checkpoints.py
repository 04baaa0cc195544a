import copy
import io
import pickle

import torch

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu", growth_interval=3)
for _ in range(3):
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaler.step(opt)
    scaler.update()
state = scaler.state_dict()
print(
    {
        k: state[k]
        for k in (
            "scale",
            "growth_factor",
            "backoff_factor",
            "growth_interval",
            "_growth_tracker",
        )
    }
)
file = io.BytesIO()
torch.save(state, file)
file.seek(0)
loaded = torch.load(file, weights_only=True)
other = torch.amp.GradScaler("cpu")
other.load_state_dict(loaded)
third = copy.deepcopy(other)
fourth = pickle.loads(pickle.dumps(scaler))
for s in (other, third, fourth):
    for _ in range(4):
        opt.zero_grad()
        s.scale(loss_of(model)).backward()
        s.step(opt)
        s.update()
    show(model, s)
