# kind: gradients of weights made in the first step, written by hand
# expect: maths exp
# cure: torch.softmax\(z, 1\)
# never: was not finite before
# step: 1
import torch

torch.manual_seed(0)
w1 = (4.0 * torch.randn(20, 64)).requires_grad_()
w2 = (4.0 * torch.randn(64, 5)).requires_grad_()


def softmax(z):
    e = torch.exp(z)  # bad
    return e / e.sum(dim=1, keepdim=True)


for _ in range(6):
    x, y = torch.randn(16, 20), torch.randint(5, (16,))
    probability = softmax(torch.relu(x @ w1) @ w2)
    loss = -torch.log(probability[torch.arange(16), y].nan_to_num() + 1e-8).mean()
    loss.backward()
    with torch.no_grad():
        for p in (w1, w2):
            p -= 0.01 * p.grad
            p.grad = None
