# expect: maths of div
# $line: mean = total / count[:, None]  # bad
# $line: mean = total.div(count.unsqueeze(-1))  # bad
# $line: mean = torch.div(total, count.view(-1, 1))  # bad
# inputs: 6

# --- setup
model = nn.Linear(6, 6)

# --- batch: x, target
x = torch.randn(8, 6)
target = torch.arange(8) % 4

# --- bad batch
target = target % 3

# --- loss
h = model(x).float()
total = torch.zeros(4, 6).index_add(0, target, h)
count = torch.zeros(4).index_add(0, target, torch.ones(8))
$line
loss = mean.square().mean()
