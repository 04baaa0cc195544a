# kind: 4
# expect: range pow
# says: square runs the op pow
# says: the gradient of the first step with it is
import torch
torch.manual_seed(0)
w = torch.nn.Linear(16, 16); o = torch.optim.SGD(w.parameters(), 0.01)
for i in range(24):
    x = torch.randn(8, 16) * (1 if i < 20 else 2000)
    with torch.autocast("cpu", torch.float16):
        h = w(x)
        l = h.half().square().mean()  # bad
    o.zero_grad(); l.float().backward(); o.step()
