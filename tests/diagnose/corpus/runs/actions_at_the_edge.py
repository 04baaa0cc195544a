# kind: data exactly at the edge of a transform's domain, whose op is in torch.distributions
# expect: maths atanh
# cure: clamp\(-0\.999999, 0\.999999\)$
# says: it changes \d of 64 values without a gradient; if they are labels, leave rows? [\d, and]+ of
# never: clamp_min
# learns: losses[-1] < losses[0]
import torch
from torch import nn
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

torch.manual_seed(3)
policy, target = nn.Linear(5, 2), torch.randn(5) * 0.2
optimizer, losses = torch.optim.Adam(policy.parameters(), lr=1e-2), []
for step in range(60):
    states = torch.randn(64, 5) * (0.3 if step < 5 else 1.5)
    actions = (states @ target).clamp(-1, 1)
    loc, log_scale = policy(states).chunk(2, 1)
    base = Normal(loc, log_scale.exp())
    expert = TransformedDistribution(base, TanhTransform(), validate_args=False)
    loss = -expert.log_prob(actions.unsqueeze(1)).mean()  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
