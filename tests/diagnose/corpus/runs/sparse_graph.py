# kind: 2
# expect: range linear|_to_copy
# says: the loss falls
import torch
from torch import Tensor, nn


class Layer(nn.Linear):
    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return torch.sparse.mm(graph, super().forward(x))  # bad


torch.manual_seed(0)
graph = torch.eye(64).to_sparse()
features, labels = torch.rand(64, 8) * 9e4, torch.arange(64) % 4
model = Layer(8, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(features, graph)
    loss = nn.functional.cross_entropy(out.float(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
