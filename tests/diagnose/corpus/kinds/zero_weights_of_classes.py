# expect: maths of nll_loss_forward div
# $line: loss = F.cross_entropy(model(x), y, weights)  # bad
# $line: loss = F.cross_entropy(model(x), y, weight=weights, label_smoothing=0.1)  # bad
# $line: loss = nn.CrossEntropyLoss(weight=weights)(model(x), y)  # bad
# $line: loss = F.nll_loss(model(x).log_softmax(-1), y, weight=weights)  # bad
# outputs: 4

# --- batch: x, y
y = torch.randint(3, (x.shape[0],)) + 1

# --- bad batch
y = torch.zeros_like(y)

# --- loss
weights = torch.tensor([0.0, 1.0, 1.0, 2.0])
$line
