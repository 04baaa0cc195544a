# expect: maths of std var
# $call: h.std(0)
# $call: torch.std(h, dim=0)
# $call: h.var(0)
# $call: h.std(dim=0, keepdim=True)

# --- batch: x

# --- bad batch
x = x[:1]

# --- loss
h = model(x).float()
loss = (h.mean(0) + $call).square().mean()  # bad
