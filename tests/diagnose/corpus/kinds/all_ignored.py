# expect: maths of nll_loss_forward div
# $line: loss = F.cross_entropy(model(x), y)  # bad
# $line: loss = nn.CrossEntropyLoss()(model(x), y)  # bad
# $line: loss = F.cross_entropy(model(x), y, label_smoothing=0.1)  # bad
# $line: loss = F.nll_loss(model(x).log_softmax(-1), y)  # bad
# outputs: 4

# --- batch: x, y
y = torch.randint(3, (x.shape[0],))

# --- bad batch
y = torch.full_like(y, -100)

# --- loss
$line
