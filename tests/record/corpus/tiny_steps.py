"""Print how many more calls of Python a recorded step takes than the step alone."""

import cProfile
import pstats
import sys

import torch
from torch import nn

import halfstep

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def num_calls() -> float:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(200):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    profile.disable()
    return pstats.Stats(profile).total_calls / 200  # type: ignore[attr-defined]


num_calls()
alone = num_calls()
with halfstep.record(sys.argv[1], every=0):
    num_calls()
    print(num_calls() - alone)
