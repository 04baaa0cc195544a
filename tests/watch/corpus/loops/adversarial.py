# expect: maths of log

import torch
from torch import nn


def adversarial(run: Run) -> None:
    critic = nn.Linear(3, 1)
    other = torch.optim.SGD(critic.parameters(), lr=0.01)
    for x, y in run.batches:
        fake = run.model(x)
        other.zero_grad()
        loss = critic(fake.detach()).mean() - critic(y).mean()
        loss.backward()
        other.step()
        run.optimizer.zero_grad()
        loss = -critic(fake).mean() + torch.log(y).mean()  # bad
        run.note(loss)
        loss.backward()
        run.optimizer.step()
