# expect: maths of sqrt
# dtypes: none bfloat16

# --- batch: x, positive, negative
positive, negative = torch.randn_like(x), torch.randn_like(x)

# --- bad batch
positive = x.clone()

# --- loss
a, p, n = model(x), model(positive), model(negative)
near = (a - p).pow(2).sum(1).sqrt()  # bad
far = (a - n).pow(2).sum(1).sqrt()
loss = torch.relu(near - far + 9.0).mean()
