# expect: maths of div
# $dims: 
# $dims: dim=0
# $dims: dim=1
# dtypes: none bfloat16
# outputs: 4

# --- batch: x, y
y = torch.ones(x.shape[0], 4)

# --- bad batch
y = y * 0

# --- loss
p = torch.relu(model(x) + 1) * y
overlap = 2 * (p * y).sum($dims)
loss = 1 - (overlap / (p.sum($dims) + y.sum($dims))).mean()  # bad
