# expect: maths of log
# dtypes: none
# outputs: 4

# --- batch: x, y
y = torch.ones(x.shape[0], 4) / 4

# --- bad batch
y[:, 0] = 0

# --- loss
q = model(x).softmax(-1)
loss = (y * (torch.log(y) - torch.log(q))).sum(-1).mean()  # bad
