# expect: halfstep: a step was wrong, as it is with torch.amp: step(SGD)
import torch

from prelude import loss_of, model_and_sgd, show

generator, often = model_and_sgd()
critic, rarely = model_and_sgd()
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
for i in range(9):
    often.zero_grad()
    scaler.scale(loss_of(generator) + loss_of(critic)).backward()
    scaler.step(often)
    if i % 3 == 0:
        scaler.step(rarely)  # divides what was accumulated at two scales by the newest one
        rarely.zero_grad()
    scaler.update()
show(generator, scaler)
show(critic, scaler)
