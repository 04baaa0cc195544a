# expect: maths of log
# $p: p
# $p: probs
# $p: pred
# dtypes: none

# --- batch: x, y, gain
y = torch.zeros(x.shape[0])
gain = 1.0

# --- bad batch
gain = 1e4

# --- loss
$p = torch.sigmoid(model(x) * gain)[:, 0]
loss = -(y * torch.log($p) + (1 - y) * torch.log(1 - $p)).mean()  # bad
