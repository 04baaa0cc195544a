# expect: data of y

# --- batch: x, y
y = torch.randn(x.shape[0])

# --- bad batch
y[0] = math.nan

# --- loss
loss = F.mse_loss(model(x).float().sum(-1), y)  # bad
