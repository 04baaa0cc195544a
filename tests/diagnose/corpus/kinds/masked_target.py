# expect: maths of nll_loss_forward sum mul nll_loss neg masked_fill
# $smoothing: 
# $smoothing: , label_smoothing=0.1
# outputs: 4

# --- batch: x, y, allowed
y = torch.zeros(x.shape[0], dtype=torch.long)
allowed = torch.ones(4, dtype=torch.bool)

# --- bad batch
allowed[0] = False

# --- loss
logits = model(x).masked_fill(~allowed, -math.inf)  # bad
loss = F.cross_entropy(logits, y$smoothing)  # bad
