# expect: maths of mean mse_loss
# $line: loss = (model(x)[mask] ** 2).mean()  # bad
# $line: loss = model(x)[mask].square().mean()  # bad
# $line: loss = F.mse_loss(model(x)[mask], torch.zeros(4)[None].expand(int(mask.sum()), 4))  # bad
# $line: loss = torch.mean(model(x)[mask].abs())  # bad
# outputs: 4

# --- batch: x, mask
mask = torch.ones(x.shape[0], dtype=torch.bool)

# --- bad batch
mask = ~mask

# --- loss
$line
