# kind: 3
# expect: none
import torch


class Halving(torch.optim.Optimizer):
    """Halves the last step that was good until the loss is finite and lower."""

    def __init__(self, params):
        super().__init__(params, {})
        self.t = 64.0

    def _moved(self, direction, t, closure):
        while t > 1e-6:
            with torch.no_grad():
                for p, d in zip(self.param_groups[0]["params"], direction, strict=True):
                    p += t * d
            loss = closure()
            if torch.isfinite(loss) and loss.item() < self.best:
                return t
            with torch.no_grad():
                for p, d in zip(self.param_groups[0]["params"], direction, strict=True):
                    p -= t * d
            t /= 2
        return t

    def step(self, closure):
        loss = closure()
        self.best = loss.item()
        direction = [-p.grad for p in self.param_groups[0]["params"]]
        self.t = 2 * self._moved(direction, self.t, closure)
        return loss


torch.manual_seed(0)
sigma = torch.ones(4, requires_grad=True)
x = 0.3 * torch.randn(64, 4)
optimizer = Halving([sigma])


def closure():
    optimizer.zero_grad()
    loss = (sigma.log() + 0.5 * (x / sigma).square()).mean()
    loss.backward()
    return loss


for _ in range(4):
    optimizer.step(closure)
