# kind: an operand of a line is named only if it is the bad one
# expect: data
# tensor: p\.grad in train
# never: lr in train|check lr
# step: 3
import torch


def train(lr=0.01):
    torch.manual_seed(0)
    weight = torch.ones(6, 3, requires_grad=True)
    for step in range(1, 7):
        loss = (torch.randn(4, 6) @ weight).square().mean()
        loss.backward()
        if step == 3:
            weight.grad.view(-1)[2] = float("nan")
        with torch.no_grad():
            for p in (weight,):
                p -= lr * p.grad  # bad
                p.grad = None


train()
