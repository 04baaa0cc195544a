# kind: 2
# expect: growth
# cure: ^standardise \S*x\S*, as by .* reaches 3,\d+ in column 2 of 4 \(from 0\), .*\nor lower .* to \d.*e-07: at
# never: clip
import torch

torch.manual_seed(3)
x = torch.rand(512, 4) * torch.tensor([1.0, 255.0, 3600.0, 10.0])
y = x @ torch.tensor([[1.0], [0.01], [0.001], [0.1]]) + 0.05 * torch.randn(512, 1)
w, b = torch.zeros(4, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([w, b], lr=1e-3, momentum=0.9)
for _ in range(20):
    rows = torch.randint(0, 512, (64,))
    loss = (x[rows] @ w + b - y[rows]).pow(2).mean()  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
