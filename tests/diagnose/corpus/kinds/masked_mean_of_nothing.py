# expect: maths of div
# $line: loss = (error * mask).sum() / mask.sum()  # bad
# $line: loss = torch.sum(error * mask) / torch.sum(mask)  # bad
# $line: loss = (error * mask).sum() / mask.sum().item()  # bad
# $line: loss = (error * mask).sum().div(mask.sum())  # bad

# --- batch: x, y, mask
y, mask = torch.randn(x.shape[0]), torch.ones(x.shape[0])

# --- bad batch
mask = torch.zeros(x.shape[0])

# --- loss
error = (model(x)[:, 0].float() - y) ** 2
$line
