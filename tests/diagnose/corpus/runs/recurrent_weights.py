# kind: growth within a step: a state is multiplied by a wide weight in each call
# expect: maths addmm
# cure: ^torch\.nn\.init\.orthogonal_\(model\.get_parameter\("rnn\.weight_hh_l0"\)\)
# says: tried for \d+ steps? of Adam on this batch: the loss falls
# says: results of addmm at .*grow [23]\.\d+-fold from call to call in this step: from .* in \d\d calls
import torch
from torch import nn

torch.manual_seed(11)


class Summer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 64, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(64, 1)
        nn.init.normal_(self.rnn.weight_hh_l0, std=0.5)

    def forward(self, x):
        states, _ = self.rnn(x)  # bad
        return self.out(states[:, -1])


model = Summer()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
x = torch.rand(8, 100, 2)
for _ in range(3):
    loss = nn.functional.mse_loss(model(x), x.sum((1, 2))[:, None] / 50)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
