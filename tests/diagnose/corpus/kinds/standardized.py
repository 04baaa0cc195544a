# expect: maths of div

# --- batch: x, reward
reward = torch.randn(x.shape[0])

# --- bad batch
reward = torch.zeros(x.shape[0])

# --- loss
advantage = (reward - reward.mean()) / reward.std()  # bad
loss = -(model(x).float().log_softmax(-1)[:, 0] * advantage).mean()
