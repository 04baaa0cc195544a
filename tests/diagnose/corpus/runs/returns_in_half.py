# kind: 8
# expect: data
# tensor: replay.ret
# says: make it float32: .* finite values to it, up to 6\d,\d+, .* 65,504: \S+:21 in push
# step: 40
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Replay:
    def __init__(self):
        self.state = torch.zeros(800, 4, dtype=torch.float16)
        self.ret, self.n = torch.zeros(800, dtype=torch.float16), 0

    def push(self, state, ret):
        rows = slice(self.n, self.n + len(ret))
        self.state[rows] = state
        self.ret[rows] = ret
        self.n += len(ret)


replay, value = Replay(), nn.Linear(4, 1)
opt = torch.optim.SGD(value.parameters(), lr=1e-2)
for step in range(1, 50):
    replay.push(torch.randn(16, 4), torch.rand(16) + 1650 * step)
    rows = slice(replay.n - 16, replay.n)
    target = replay.ret[rows].float() / 1000
    loss = F.smooth_l1_loss(value(replay.state[rows].float()).squeeze(1), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
